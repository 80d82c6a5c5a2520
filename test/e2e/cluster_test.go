//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
)

// eventually polls until done returns true, and fails with what it last said.
func eventually(t *testing.T, what string, done func(ctx context.Context) (bool, string)) {
	t.Helper()
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, podTimeout, true, func(ctx context.Context) (bool, error) {
		var ok bool
		ok, last = done(ctx)
		return ok, nil
	})
	if err != nil {
		t.Fatalf("%s: not within %s; last seen: %s", what, podTimeout, last)
	}
}

// namespace makes one for the test and removes it, waiting for the pods to
// be gone: a claim is unprepared before its pod disappears.
func namespace(t *testing.T) string {
	t.Helper()
	ns, err := client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating a namespace: %v", err)
	}
	t.Cleanup(func() { deleteNamespace(t, ns.Name) })
	return ns.Name
}

func deleteNamespace(t *testing.T, name string) {
	t.Helper()
	if out, err := exec.Command("kubectl", "delete", "namespace", name, "--ignore-not-found", "--timeout=60s").CombinedOutput(); err != nil {
		t.Errorf("deleting namespace %s: %v\n%s", name, err, out)
	}
}

func apply(t *testing.T, ns, manifest string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "kubectl", "apply", "-n", ns, "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, manifest)
	}
}

func waitRunning(t *testing.T, ns, pod string) {
	t.Helper()
	eventually(t, "pod "+pod+" running", func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return true, ""
			}
		}
		return false, fmt.Sprintf("phase %s; events: %s", p.Status.Phase, strings.Join(events(ctx, ns, pod), " | "))
	})
}

func events(ctx context.Context, ns, pod string) []string {
	list, err := client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("involvedObject.name", pod).String(),
	})
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for _, e := range list.Items {
		out = append(out, e.Reason+": "+e.Message)
	}
	return out
}

func logs(t *testing.T, ns, pod, container string) string {
	t.Helper()
	raw, err := client.CoreV1().Pods(ns).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(t.Context())
	if err != nil {
		t.Fatalf("reading the log of %s/%s %s: %v", ns, pod, container, err)
	}
	return string(raw)
}

// waitLog waits for a container that prints and then stays to have printed.
func waitLog(t *testing.T, ns, pod, container, want string) string {
	t.Helper()
	var got string
	eventually(t, fmt.Sprintf("log of %s to contain %q", pod, want), func(context.Context) (bool, string) {
		got = logs(t, ns, pod, container)
		return strings.Contains(got, want), got
	})
	return got
}

// publishedSlices returns this driver's slices of the node.
func publishedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, driverName).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("listing ResourceSlices of %s: %w", driverName, err)
	}
	return list.Items, nil
}

// simulated is the part of `gpusim show -o json` that the tests look at.
type simulated struct {
	BootID string
	GPUs   []simulatedGPU
}

type simulatedGPU struct {
	PCIAddress string
	Minor      int
	MIG        *struct {
		Current   bool
		Instances []struct{ ID int }
	}
}

func showMachine(t *testing.T) simulated {
	t.Helper()
	out, err := gpusim(t.Context(), "show", "-o", "json", "--root", machineRoot)
	if err != nil {
		t.Fatal(err)
	}
	var m simulated
	if err := json.Unmarshal(out, &m); err != nil {
		t.Fatalf("decoding the output of gpusim show: %v\n%s", err, out)
	}
	return m
}

func gpusim(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(repoRoot, "bin", "gpusim"), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("gpusim %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return out, nil
}

// checkNothingLeft asserts that no GPU instance, MIG mode, CDI spec or
// journal file outlives the claims.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, "nothing left on the node", func(context.Context) (bool, string) {
		var left []string
		for _, g := range showMachine(t).GPUs {
			if g.MIG != nil && (g.MIG.Current || len(g.MIG.Instances) > 0) {
				left = append(left, fmt.Sprintf("GPU %s: MIG mode %v, %d instances", g.PCIAddress, g.MIG.Current, len(g.MIG.Instances)))
			}
		}
		for _, dir := range []string{cdiDir, journalDir} {
			entries, err := os.ReadDir(dir)
			if err != nil && !os.IsNotExist(err) {
				left = append(left, err.Error())
			}
			for _, e := range entries {
				left = append(left, filepath.Join(dir, e.Name()))
			}
		}
		return len(left) == 0, strings.Join(left, "; ")
	})
}
