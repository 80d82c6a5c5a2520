//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	policyConfigMap = "partage-sharing-policy"
	policyKey       = "policy.yaml"
	policyHeader    = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n"
	withdrawn       = driverName + "/withdrawn"

	// The kubelet looks at a pod's ConfigMaps when it looks at the pod, which is
	// every minute or so.
	policyTimeout = 3 * time.Minute
)

// setPolicy writes what the chart writes.
func setPolicy(ctx context.Context, content string) error {
	patch, err := json.Marshal(corev1.ConfigMap{Data: map[string]string{policyKey: content}})
	if err != nil {
		return fmt.Errorf("encoding a policy: %w", err)
	}
	_, err = client.CoreV1().ConfigMaps(driverNamespace).Patch(ctx, policyConfigMap, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s: %w", policyConfigMap, err)
	}
	return nil
}

// hasten makes the kubelet look at the plugin's pod now, by changing an annotation.
func hasten(ctx context.Context, pod string) {
	patch := fmt.Sprintf(`{"metadata": {"annotations": {"e2e.partage.dev/hasten": %q}}}`, time.Now().Format(time.RFC3339Nano))
	_, _ = client.CoreV1().Pods(driverNamespace).Patch(ctx, pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
}

// waitPublished waits until what is published fulfils a condition, which returns
// what it saw otherwise.
func waitPublished(t *testing.T, what string, fulfilled func(devices []resourceapi.Device) string) {
	t.Helper()
	pod := driverPod(t, pluginComponent).Name
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), time.Second, policyTimeout, true, func(ctx context.Context) (bool, error) {
		published, err := publishedSlices(ctx)
		if err != nil {
			last = err.Error()
			return false, nil //nolint:nilerr // it is tried again
		}
		var devices []resourceapi.Device
		for _, s := range published {
			devices = append(devices, s.Spec.Devices...)
		}
		if last = fulfilled(devices); last != "" {
			hasten(ctx, pod)
		}
		return last == "", nil
	})
	if err != nil {
		t.Fatalf("%s: not within %s; last seen: %s", what, policyTimeout, last)
	}
}

func typeOf(d resourceapi.Device) string { return *d.Attributes["type"].StringValue }

func isWithdrawn(d resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(taint resourceapi.DeviceTaint) bool { return taint.Key == withdrawn })
}

// TestPolicyChange: the policy changes while a share is in use. No pod of the driver
// is restarted, the allocated device stays, and what is offered follows.
func TestPolicyChange(t *testing.T) {
	ns := namespace(t)
	plugin := driverPod(t, pluginComponent)
	uuid := runningClient(t, ns, "before", mpsShare("10Gi", 25))
	t.Cleanup(func() {
		if err := setPolicy(context.WithoutCancel(t.Context()), policyHeader); err != nil {
			t.Error(err)
		}
	})
	change := func(content string) {
		t.Helper()
		if err := setPolicy(t.Context(), policyHeader+content); err != nil {
			t.Fatal(err)
		}
	}

	change("default: {kinds: [gpu, mps], mps: {clients: 2}}\n")
	waitPublished(t, "MPS for two claims, no partitions", func(devices []resourceapi.Device) string {
		for _, d := range devices {
			shares := d.Capacity["shares"].Value
			switch {
			case typeOf(d) == "mps" && (shares.Value() != 2 || isWithdrawn(d)):
				return fmt.Sprintf("%s: %v", d.Name, d)
			case (typeOf(d) == "mig" || typeOf(d) == "timeslice") && !isWithdrawn(d):
				return d.Name + " is offered"
			}
		}
		return ""
	})

	change("default: {kinds: [gpu]}\n")
	waitPublished(t, "no shares", func(devices []resourceapi.Device) string {
		allocated := false
		for _, d := range devices {
			if typeOf(d) != "gpu" && !isWithdrawn(d) {
				return d.Name + " is offered"
			}
			allocated = allocated || typeOf(d) == "mps" && *d.Attributes["parentUUID"].StringValue == uuid
		}
		if !allocated {
			return "the device of a claim is gone"
		}
		return ""
	})
	wantSame(t, ns, "before")
	apply(t, ns, claim("refused", mpsShare("10Gi", 25), "")+podUsing("refused", "resourceClaimName: refused"))
	eventually(t, "a share that is not offered to stay unallocated", func(ctx context.Context) (bool, string) {
		all := events(ctx, ns, "refused")
		return slices.ContainsFunc(all, func(e string) bool { return strings.HasPrefix(e, "FailedScheduling") }), strings.Join(all, " | ")
	})

	// A policy that makes no sense changes nothing, and is told.
	change("default: {kinds: []}\n")
	waitPolicyEvent(t, plugin.Name)

	change("")
	waitPublished(t, "everything again", func(devices []resourceapi.Device) string {
		for _, d := range devices {
			if isWithdrawn(d) {
				return d.Name + " is withdrawn"
			}
		}
		return ""
	})
	waitRunning(t, ns, "refused")
	wantSame(t, ns, "before")
	if now := driverPod(t, pluginComponent); now.Name != plugin.Name || now.Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the plugin's pod was %s and is %s, or its container was started again", plugin.Name, now.Name)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// waitPolicyEvent waits for the node's event about a policy that cannot be used.
func waitPolicyEvent(t *testing.T, pod string) {
	t.Helper()
	node := driverPod(t, pluginComponent).Spec.NodeName
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), time.Second, policyTimeout, true, func(ctx context.Context) (bool, error) {
		all := events(ctx, metav1.NamespaceDefault, node)
		last = strings.Join(all, " | ")
		for _, e := range all {
			if strings.HasPrefix(e, "SharingPolicyInvalid") && strings.Contains(e, "kinds") {
				return true, nil
			}
		}
		hasten(ctx, pod)
		return false, nil
	})
	if err != nil {
		t.Fatalf("no event of node %s about the policy within %s; last seen: %s", node, policyTimeout, last)
	}
}
