//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNoSuchDevice checks that a claim that no node can satisfy leaves its pod Pending with the scheduler's reason.
func TestNoSuchDevice(t *testing.T) {
	t.Parallel()
	ns, _ := reserve(t, 0)
	apply(t, ns, claim("c", noSuch, "")+podUsing("p", "c"))
	waitEvent(t, ns, "p", "FailedScheduling", "cannot allocate all claims")
}

// TestRefusedConfig checks that the API server refuses a template with a wrong config and names the field, and takes a right one.
func TestRefusedConfig(t *testing.T) {
	t.Parallel()
	ns, _ := reserve(t, 0)
	template := func(config string) string {
		return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: %s}], %s}}}
`, wholeGPU, config)
	}
	for config, want := range map[string]string{
		opaqueConfig("GpuConfig", `sharring: {strategy: MPS}`):                                                        "spec.spec.devices.config[0].opaque.parameters.sharring: Invalid value: unknown field",
		opaqueConfig("GpuConfig", `sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}`):        "defaultActiveThreadPercentage: Invalid value: 101: must be between 0 and 100",
		opaqueConfig("MigDeviceConfig", `sharing: {strategy: MPS}`):                                                   "a whole GPU takes a GpuConfig",
		strings.Replace(opaqueConfig("GpuConfig", `sharing: {strategy: MPS}`), "gpu.nvidia.com", "gpu.nvidia.org", 1): `opaque.driver: Invalid value: "gpu.nvidia.org"`,
		opaqueConfig("GpuConfig", `sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 10}}`):        "must be at least 1Mi",
	} {
		out, err := tryApply(t, ns, template(config))
		if err == nil || !strings.Contains(out, want) || !strings.Contains(out, `resourceclaimtemplates.resource.k8s.io "gpus" is forbidden`) {
			t.Errorf("%s: %v: %s, want %s", config, err, out, want)
		}
	}
	apply(t, ns, template(opaqueConfig("GpuConfig", `sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50}}`)))
}

// TestPolicyTypes checks that the API server finds no wrong types in the admission policies of the chart.
func TestPolicyTypes(t *testing.T) {
	t.Parallel()
	policies := 0
	eventually(t, "the admission policies checked", func(ctx context.Context) (bool, string) {
		all, err := client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/managed-by=Helm"})
		if err != nil {
			return false, err.Error()
		}
		policies = len(all.Items)
		for _, p := range all.Items {
			if p.Status.TypeChecking == nil {
				return false, p.Name + " is not checked"
			}
			for _, warning := range p.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", p.Name, warning.FieldRef, warning.Warning)
			}
		}
		return true, ""
	})
	if policies < 5 {
		t.Errorf("%d policies", policies)
	}
}

// TestInvalidConfig checks that an opaque config that is wrong for the claim's devices fails Prepare, with an event of the pod that
// names the field. What is wrong in itself the API server refuses.
func TestInvalidConfig(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		request request
		kind    string
	}{
		"whole GPU": {wholeGPU, "GpuConfig"},
		"partition": {oneSlice, "MigDeviceConfig"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns, gpus := reserve(t, 1)
			apply(t, ns, claim("c", tc.request.on(gpus...), limitOfNoDevice(tc.kind))+podUsing("p", "c"))
			waitEvent(t, ns, "p", "FailedPrepareDynamicResources", "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit")
		})
	}
}

var migUUID = regexp.MustCompile(`MIG-[0-9a-f-]{36}`)

// TestSeveralPodsOneClaim checks that pods that share a claim see the same partition, which lives until the last of them has ended.
func TestSeveralPodsOneClaim(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("c", oneSlice.on(gpus...), "")+podUsing("a", "c")+podUsing("b", "c"))
	seen := map[string]bool{}
	for _, pod := range []string{"a", "b"} {
		waitRunning(t, ns, pod)
		out := waitLog(t, ns, pod, "main", "MIG 1g.10gb")
		uuids := migUUID.FindAllString(out, -1)
		if len(uuids) != 1 {
			t.Fatalf("pod %s sees %d partitions, want exactly 1:\n%s", pod, len(uuids), out)
		}
		seen[uuids[0]] = true
	}
	if len(seen) != 1 {
		t.Errorf("the pods see different partitions: %v", seen)
	}

	deletePod(t, ns, "a")
	for _, g := range showMachine(t).GPUs {
		if g.UUID == gpus[0].UUID && len(g.MIG.Instances) != 1 {
			t.Errorf("%d GPU instances after the first of two pods ended, want 1", len(g.MIG.Instances))
		}
	}
}

// TestSeveralClaimsOnePod checks a pod with a whole GPU and a partition from two claims.
func TestSeveralClaimsOnePod(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 2)
	apply(t, ns, claim("whole", wholeGPU.on(gpus...), "")+claim("part", oneSlice.on(gpus...), "")+
		pod("p", []container{{"main", listAndStay, []string{"whole", "part"}}}))
	waitRunning(t, ns, "p")
	out := waitLog(t, ns, "p", "main", "MIG 1g.10gb")
	if n := strings.Count(out, "UUID: GPU-"); n != 2 {
		t.Errorf("the pod sees %d GPUs, want the whole one and the partition's parent:\n%s", n, out)
	}
}
