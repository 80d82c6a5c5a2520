//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
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

// driverPod is the one pod of a component of the driver.
func driverPod(t *testing.T, component string) corev1.Pod {
	t.Helper()
	pods, err := client.CoreV1().Pods(driverNamespace).List(t.Context(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=partage,app.kubernetes.io/component=" + component,
	})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("finding the pod of %s in namespace %s: %d found, %v", component, driverNamespace, len(pods.Items), err)
	}
	return pods.Items[0]
}
