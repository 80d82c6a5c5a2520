//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"regexp"
	"strings"
	"testing"
)

// TestNoSuchDevice checks that a claim that no node can satisfy leaves its pod Pending with the scheduler's reason.
func TestNoSuchDevice(t *testing.T) {
	t.Parallel()
	ns, _ := reserve(t, 0)
	apply(t, ns, claim("c", noSuch, "")+podUsing("p", "c"))
	waitEvent(t, ns, "p", "FailedScheduling", "cannot allocate all claims")
}

// TestInvalidConfig checks that an opaque config with a wrong field fails Prepare, with an event of the pod that names the field.
func TestInvalidConfig(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		request                request
		kind, parameters, want string
	}{
		"unknown field":      {wholeGPU, "GpuConfig", `sharring: {strategy: MPS}`, "sharring"},
		"bad interval":       {wholeGPU, "GpuConfig", `sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Forever}}`, "sharing.timeSlicingConfig.interval"},
		"partition, unknown": {oneSlice, "MigDeviceConfig", `share: {}`, "share"},
		"bad limit":          {wholeGPU, "GpuConfig", `sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}`, "sharing.mpsConfig.defaultActiveThreadPercentage"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns, gpus := reserve(t, 1)
			apply(t, ns, claim("c", tc.request.on(gpus...), opaqueConfig(tc.kind, tc.parameters))+podUsing("p", "c"))
			waitEvent(t, ns, "p", "FailedPrepareDynamicResources", tc.want)
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
