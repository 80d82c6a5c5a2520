// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestPinned: a GPU that a claim names by its UUID is found on the node that has it, and the claim that holds it there is in the way, although other
// nodes look the same.
func TestPinned(t *testing.T) {
	f := fleettest.New(t)
	for _, node := range []string{"n1", "n2", "n3"} {
		f.AddNode(node, "h100-80-sxm", 1)
		f.Held("a", node, node, fleettest.Request(whole))
	}
	pinned := fmt.Sprintf("device.attributes['%s'].uuid == '%s'", fleettest.Driver, fleettest.GPUOf("n3", 0))
	claim := f.Claim("team", "c", fleettest.Request(whole, pinned))
	e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Claim(t.Context(), claim)
	if len(e.Reasons) != 1 || e.Reasons[0].Cause != Held || len(e.InTheWay) != 1 || e.InTheWay[0].Node != "n3" {
		t.Errorf("%+v\n%s", e.Reasons, text(t, e))
	}
}

// TestInTheWay: claims are in the way only if what they have would do, and only if the node has enough of it.
func TestInTheWay(t *testing.T) {
	for name, c := range map[string]struct {
		add     func(f *fleettest.Fleet)
		request resourceapi.DeviceRequest
	}{
		"too small": {func(f *fleettest.Fleet) {
			f.AddNode("n2", "t4", 1)
			f.Held("other", "n2", "n2", fleettest.Request(whole))
		}, fleettest.Share(mps, "40Gi", "")},
		"too few": {func(f *fleettest.Fleet) {
			f.AddNode("n2", "h100-80-sxm", 1)
			f.Held("other", "n2", "n2", fleettest.Request(whole))
		}, fleettest.Count(2, whole)},
		"lost": {func(f *fleettest.Fleet) {
			f.AddNode("n2", "h100-80-sxm", 1)
			f.Held("other", "n2", "n2", fleettest.Request(whole))
			taint(f)
			f.TaintRules[0].Spec.DeviceSelector.Pool = new("n2")
		}, fleettest.Request(whole)},
		"elsewhere on the GPU": {func(f *fleettest.Fleet) {
			for i := range f.Claims {
				f.Claims[i].Status.Allocation.Devices.Results[0].Device = fmt.Sprintf("gpu-0000-%s-00-0-mig-2g20gb-0", []string{"1b", "28"}[i])
				f.Held("other", fmt.Sprint("n2-", i), "n1", fleettest.Request(mig, fleettest.Profile("1g.10gb")))
				f.Claims[len(f.Claims)-1].Status.Allocation.Devices.Results[0].Device = fmt.Sprintf("gpu-0000-%s-00-0-mig-1g10gb-6", []string{"1b", "28"}[i])
			}
		}, fleettest.Request(mig, fleettest.Profile("4g.40gb"))},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 2)
		f.Held("other", "n1-0", "n1", fleettest.Request(whole))
		f.Held("other", "n1-1", "n1", fleettest.Request(whole))
		c.add(f)
		claim := f.Claim("team", "llm", c.request)
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pod("team", "llm", fleettest.Uses(claim)))
		var got []string
		for _, h := range e.InTheWay {
			got = append(got, h.Claim)
		}
		if !slices.Equal(got, []string{"n1-0", "n1-1"}) {
			t.Errorf("%s: in the way are %v of:\n%s", name, got, text(t, e))
		}
	}
}

// TestInTheWayOfNone: claims are not in the way of an alternative that the node never could serve.
func TestInTheWayOfNone(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	f.Held("other", "first", "n1", fleettest.Request(whole, "device.attributes['resource.kubernetes.io'].pciBusID == '0000:1b:00.0'"))
	f.Held("other", "second", "n1", fleettest.Request(whole))
	claim := f.Claim("team", "llm", resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "three", DeviceClassName: whole, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 3},
		{
			Name: "one", DeviceClassName: whole, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			Selectors: fleettest.Selectors("device.attributes['resource.kubernetes.io'].pciBusID == '0000:1b:00.0'"),
		},
	}})
	e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pod("team", "llm", fleettest.Uses(claim)))
	if len(e.InTheWay) != 1 || e.InTheWay[0].Claim != "first" {
		t.Errorf("%s", text(t, e))
	}
}
