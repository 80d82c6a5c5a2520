//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
)

// polls look soon and then less often, so that many that wait leave the machine to what they wait for.
var polls = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 1.5, Steps: math.MaxInt, Cap: time.Second}

// eventually polls until done returns true, and fails the test with what done returned last. It also works while the test is
// cleaned up.
func eventually(t *testing.T, what string, done func(ctx context.Context) (bool, string)) {
	t.Helper()
	last := ""
	ctx := context.WithoutCancel(t.Context())
	limited, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	err := polls.DelayFunc().Until(limited, true, true, func(context.Context) (bool, error) {
		// With a limit of its own: one that is nearly reached would be all that is said in the end.
		ctx, cancel := context.WithTimeout(ctx, waitLimit)
		defer cancel()
		var ok bool
		ok, last = done(ctx)
		return ok, nil
	})
	if err != nil {
		t.Fatalf("%s: not within %s; last seen: %s", what, waitLimit, last)
	}
}

// apply creates what a manifest describes in a namespace.
func apply(t *testing.T, ns, manifest string) {
	t.Helper()
	if out, err := tryApply(t, ns, manifest); err != nil {
		t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, manifest)
	}
}

// tryApply is apply for a manifest that may be refused.
func tryApply(t *testing.T, ns, manifest string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "kubectl", "apply", "-n", ns, "-f", "-")
	cmd.Stdin = strings.NewReader(manifest)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// waitRunning waits until a pod is ready. A Prepare that fails ends the test: the kubelet tries again, so the pod would start in
// the end.
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
		seen := events(ctx, ns, pod)
		if slices.ContainsFunc(seen, isFailedPrepare) {
			t.Fatalf("pod %s: %s", pod, strings.Join(seen, " | "))
		}
		return false, fmt.Sprintf("phase %s; events: %s", p.Status.Phase, strings.Join(seen, " | "))
	})
}

func isFailedPrepare(event string) bool {
	return strings.HasPrefix(event, "FailedPrepareDynamicResources: ")
}

// waitEvent waits for an event of an object with a reason, a part of whose message is given.
func waitEvent(t *testing.T, ns, object, reason, part string) {
	t.Helper()
	eventually(t, fmt.Sprintf("event %s of %s about %q", reason, object, part), func(ctx context.Context) (bool, string) {
		seen := events(ctx, ns, object)
		return slices.ContainsFunc(seen, func(e string) bool {
			return strings.HasPrefix(e, reason+": ") && strings.Contains(e, part)
		}), strings.Join(seen, " | ")
	})
}

// events returns the events of an object, each as "reason: message".
func events(ctx context.Context, ns, object string) []string {
	list, err := client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("involvedObject.name", object).String(),
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

// logs returns what a container has printed.
func logs(t *testing.T, ns, pod, container string) string {
	t.Helper()
	got, err := tryLogs(t.Context(), ns, pod, container)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// tryLogs is logs where that may fail: the kubelet is asked for them, and a container may be about to start again.
func tryLogs(ctx context.Context, ns, pod, container string) (string, error) {
	raw, err := client.CoreV1().Pods(ns).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the log of %s/%s %s: %w", ns, pod, container, err)
	}
	return string(raw), nil
}

// waitLog waits until a container has printed a text, and returns all that it printed.
func waitLog(t *testing.T, ns, pod, container, want string) string {
	t.Helper()
	var got string
	eventually(t, fmt.Sprintf("log of %s to contain %q", pod, want), func(ctx context.Context) (bool, string) {
		var err error
		if got, err = tryLogs(ctx, ns, pod, container); err != nil {
			return false, err.Error()
		}
		return strings.Contains(got, want), got
	})
	return got
}

// publishedSlices returns the ResourceSlices of this driver.
func publishedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, driverName).String(),
	})
	if err != nil {
		return nil, fmt.Errorf("listing ResourceSlices of %s: %w", driverName, err)
	}
	return list.Items, nil
}

// driverPod returns the only pod of a component of the driver.
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
