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
)

const (
	policyConfigMap = "partage-sharing-policy"
	policyKey       = "policy.yaml"
	policyHeader    = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n"
	withdrawn       = driverName + "/withdrawn"
)

// setPolicy writes the ConfigMap that the chart writes.
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

// hasten makes the kubelet sync the plugin's pod now, and with it its ConfigMaps, by changing an annotation. By itself it does so
// about once a minute.
func hasten(ctx context.Context, pod string) {
	patch := fmt.Sprintf(`{"metadata": {"annotations": {"e2e.partage.dev/hasten": %q}}}`, time.Now().Format(time.RFC3339Nano))
	_, _ = client.CoreV1().Pods(driverNamespace).Patch(ctx, pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
}

// hastenedly is eventually for what follows a change of the policy. It hastens once a second.
func hastenedly(t *testing.T, what string, done func(ctx context.Context) (bool, string)) {
	t.Helper()
	pod := driverPod(t, pluginComponent).Name
	var last time.Time
	eventually(t, what, func(ctx context.Context) (bool, string) {
		if time.Since(last) > time.Second {
			hasten(ctx, pod)
			last = time.Now()
		}
		return done(ctx)
	})
}

// waitPublished waits until mismatch, called with the published devices, returns "".
func waitPublished(t *testing.T, what string, mismatch func(devices []resourceapi.Device) string) {
	t.Helper()
	hastenedly(t, what, func(ctx context.Context) (bool, string) {
		published, err := publishedSlices(ctx)
		if err != nil {
			return false, err.Error()
		}
		var devices []resourceapi.Device
		for _, s := range published {
			devices = append(devices, s.Spec.Devices...)
		}
		seen := mismatch(devices)
		return seen == "", seen
	})
}

func typeOf(d resourceapi.Device) string { return *d.Attributes["type"].StringValue }

func isWithdrawn(d resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(taint resourceapi.DeviceTaint) bool { return taint.Key == withdrawn })
}

// TestNodePolicyChange changes the policy while a share is in use, and checks that no pod of the driver is restarted, that the
// allocated device stays, and that the published devices follow.
func TestNodePolicyChange(t *testing.T) {
	ns := reserveNode(t)
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

	// The GPUs are left alone, but for what is in use.
	change("default: {kinds: []}\n")
	waitPublished(t, "nothing", func(devices []resourceapi.Device) string {
		allocated := false
		for _, d := range devices {
			// A GPU has its observer as long as it has other devices.
			if !isWithdrawn(d) && typeOf(d) != "observer" {
				return d.Name + " is offered"
			}
			allocated = allocated || typeOf(d) == "mps" && *d.Attributes["parentUUID"].StringValue == uuid
		}
		if !allocated {
			return "the device of a claim is gone"
		}
		return ""
	})
	wantClient(t, ns, "before")
	apply(t, ns, claim("refused", mpsShare("10Gi", 25), "")+podUsing("refused", "refused"))
	waitEvent(t, ns, "refused", "FailedScheduling", "")

	// An invalid policy changes nothing but makes an event of the node.
	change("default: {kinds: [gpus]}\n")
	hastenedly(t, "an event of the node about the policy", func(ctx context.Context) (bool, string) {
		all := events(ctx, metav1.NamespaceDefault, plugin.Spec.NodeName)
		return slices.ContainsFunc(all, func(e string) bool {
			return strings.HasPrefix(e, "SharingPolicyInvalid: ") && strings.Contains(e, "kinds")
		}), strings.Join(all, " | ")
	})

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
	wantClient(t, ns, "before")
	if now := driverPod(t, pluginComponent); now.Name != plugin.Name || now.Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the plugin's pod was %s and is %s, or its container was restarted", plugin.Name, now.Name)
	}
}
