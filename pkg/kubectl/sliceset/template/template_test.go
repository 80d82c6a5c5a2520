// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package template

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

const driver = "gpu.nvidia.com"

var defaults = Options{Driver: driver, Node: "gpu-node"}

// machines are all models, those with a fixed MIG mode twice.
func machines(t *testing.T, count int) []Machine {
	t.Helper()
	var all []Machine
	for _, name := range boards.Names() {
		all = append(all, Machine{Model: name, Count: count})
		facts, err := boards.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		if m := facts.GPUs[0].MIG; m != nil && !m.Dynamic {
			all = append(all, Machine{Model: name, Count: count, MIG: true})
		}
	}
	if len(all) < 16 {
		t.Fatalf("only %d machines", len(all))
	}
	return all
}

// TestAllocator: the scheduler's allocator gives claims every kind of device of a template, and
// as many GPUs as it has.
func TestAllocator(t *testing.T) {
	t.Parallel()
	asked := 0
	for _, m := range machines(t, 2) {
		t.Run(fmt.Sprintf("%s mig=%t", m.Model, m.MIG), func(t *testing.T) {
			made, problems, err := m.Slices(defaults)
			if err != nil || len(problems) > 0 {
				t.Fatal(err, problems)
			}
			f := fleettest.New(t)
			types := map[string]bool{}
			profiles := map[string]bool{}
			for i := range made {
				f.Slices = append(f.Slices, &made[i])
				for _, d := range made[i].Spec.Devices {
					types[*d.Attributes["type"].StringValue] = true
					if *d.Attributes["type"].StringValue == "mig" {
						profiles[*d.Attributes["profile"].StringValue] = true
					}
				}
			}
			requests := map[string]resourceapi.DeviceRequest{}
			for kind, class := range map[string]string{"gpu": "gpu.nvidia.com", "mps": "mps.partage.dev", "timeslice": "timeslice.partage.dev"} {
				if types[kind] {
					requests["two "+kind] = fleettest.Count(2, class)
				}
			}
			for p := range profiles {
				requests[p] = fleettest.Count(2, "mig.nvidia.com", fleettest.Profile(p))
			}
			if len(requests) < 3 {
				t.Fatalf("the template offers %v only", requests)
			}
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-node"}}
			planner := allocation.New(f.Snapshot)
			for what, r := range requests {
				claim := f.Claim("a", "c", r)
				if a := planner.OnNode(t.Context(), node, []*resourceapi.ResourceClaim{claim}); a.Verdict != allocation.Fits {
					t.Errorf("%s: %s %v", what, a.Verdict, a.Err)
				}
				asked++
			}
			if three := planner.OnNode(t.Context(), node, []*resourceapi.ResourceClaim{
				f.Claim("a", "c", fleettest.Count(3, "gpu.nvidia.com")),
			}); three.Verdict != allocation.Refused {
				t.Errorf("three of two GPUs: %s %v", three.Verdict, three.Err)
			}
		})
	}
	if asked < 80 {
		t.Errorf("asked %d times", asked)
	}
}

// TestStrip: what is made of a node on which all kinds of things happen is what a new node of
// the same kind would publish.
func TestStrip(t *testing.T) {
	t.Parallel()
	m := Machine{Model: "h100", Count: 2}
	offer := policy.Builtin().Default
	offer.TimeSlice = nil
	terms := device.Terms{Policy: &policy.Policy{Default: offer, Health: policy.Builtin().Health}}
	want := inventory(t, m, terms)

	facts, err := m.Facts()
	if err != nil {
		t.Fatal(err)
	}
	for i := range facts.GPUs {
		facts.GPUs[i].UUID = fmt.Sprintf("GPU-%08d-1111-1111-1111-111111111111", i)
	}
	terms.Keep = map[string]bool{"gpu-0000-10-00-0-timeslice": true}
	busy, err := device.NewInventory(facts, terms)
	if err != nil {
		t.Fatal(err)
	}
	busy = busy.With(device.Status{
		Static:     []device.Static{{PCIAddress: address(0), ProfileID: 19, Placement: gpu.Placement{Start: 6, Size: 1}, UUID: "MIG-1"}},
		Conditions: []device.Condition{{PCIAddress: address(1), Reason: device.Lost}},
	})
	var live []*resourceapi.ResourceSlice
	for _, s := range busy.ResourceSlices(device.Options{Driver: driver, Pool: "node-7", NodeName: "node-7", PartitionableDevices: true, ConsumableCapacity: true}) {
		s.UID, s.ResourceVersion, s.Spec.Pool.Generation = "uid", "17", 4
		live = append(live, &s)
	}
	old := live[0].DeepCopy()
	old.Name, old.Spec.Pool.Generation = "old", 3
	another := live[0].DeepCopy()
	another.Name, another.Spec.NodeName = "another", new("node-8")
	published := append(slices.Clone(live), old, another)

	got, err := Strip(published, "node-7", defaults)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if *live[1].Spec.Devices[0].Attributes["parentUUID"].StringValue == *got[1].Spec.Devices[0].Attributes["parentUUID"].StringValue {
		t.Error("the slices that were read have changed, or nothing was replaced")
	}
	for what, c := range map[string]struct {
		slices []*resourceapi.ResourceSlice
		node   string
		want   string
	}{
		"no slices":  {published, "node-9", "node node-9 has no ResourceSlices of the driver gpu.nvidia.com"},
		"incomplete": {published[1:], "node-7", "node node-7 has 2 of 3 ResourceSlices"},
	} {
		if _, err := Strip(c.slices, c.node, defaults); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", what, err, c.want)
		}
	}
}

// TestStripNVLinkDomain: a domain is named after one of its GPUs, whose UUID is replaced.
func TestStripNVLinkDomain(t *testing.T) {
	facts, err := Machine{Model: "h100", Count: 2}.Facts()
	if err != nil {
		t.Fatal(err)
	}
	for i := range facts.GPUs {
		facts.GPUs[i].NVLink = &gpu.NVLink{Switches: []string{gpu.UnknownSwitch}}
		facts.GPUs[i].UUID = fmt.Sprintf("GPU-%08d-1111-1111-1111-111111111111", i)
	}
	i, err := device.NewInventory(facts, device.Terms{})
	if err != nil {
		t.Fatal(err)
	}
	var live []*resourceapi.ResourceSlice
	for _, s := range i.ResourceSlices(device.Options{Driver: driver, Pool: "node-7", NodeName: "node-7", PartitionableDevices: true, ConsumableCapacity: true}) {
		live = append(live, &s)
	}
	got, err := Strip(live, "node-7", defaults)
	if err != nil {
		t.Fatal(err)
	}
	domains := 0
	for _, s := range got {
		for _, d := range s.Spec.Devices {
			if domain := d.Attributes["nvlinkDomain"].StringValue; domain != nil {
				if domains++; *domain != placeholder(0) {
					t.Errorf("%s is in %s", d.Name, *domain)
				}
			}
		}
	}
	if domains != 2 {
		t.Errorf("%d GPUs are in a domain", domains)
	}
}

func inventory(t *testing.T, m Machine, terms device.Terms) []resourceapi.ResourceSlice {
	t.Helper()
	facts, err := m.Facts()
	if err != nil {
		t.Fatal(err)
	}
	i, err := device.NewInventory(facts, terms)
	if err != nil {
		t.Fatal(err)
	}
	return i.ResourceSlices(device.Options{Driver: driver, Pool: "gpu-node", NodeName: "gpu-node", PartitionableDevices: true, ConsumableCapacity: true})
}
