// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// classes has one class, for partitions.
type classes struct{}

func (classes) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (classes) Get(name string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.nvidia.com"].type == "mig"`}}},
	}}, nil
}

// TestAllocator holds the rule of the first device that fits against the allocator of the
// scheduler, on GPUs that are filled at random, in both orders.
func TestAllocator(t *testing.T) {
	b, cases, accepted := load(t, "h100-80-sxm"), 0, 0
	cache := cel.NewCache(10, cel.Features{})
	for _, rule := range []Rule{Published, Alphabetical} {
		objects := node(t, 3, rule)
		chooser := NewChooser(b, rule)
		visit(b, 40, func(gpus []Held) {
			for profile, name := range b.Profiles {
				want := ""
				if g, p, ok := chooser.Choose(gpus, profile); ok {
					want = nameOn(t, objects, b, g, p)
					accepted++
				}
				if got := allocate(t, cache, objects, b, gpus, name); got != want {
					t.Fatalf("%s, %s in %b: the allocator takes %q, the simulation %q", rule.Name, name, gpus, got, want)
				}
				cases++
			}
		})
	}
	if cases != 480 || accepted < 100 || accepted > 400 {
		t.Errorf("%d cases, of which %d are accepted; want 480, and some of both", cases, accepted)
	}
}

// node has the slices of a node with the devices in the order of a rule.
func node(t *testing.T, gpus int, r Rule) []*resourceapi.ResourceSlice {
	t.Helper()
	made, err := slicesOf("h100-80-sxm", gpus)
	if err != nil {
		t.Fatal(err)
	}
	var objects []*resourceapi.ResourceSlice
	for i := range made {
		if r.Name == Alphabetical.Name {
			slices.SortFunc(made[i].Spec.Devices, func(x, y resourceapi.Device) int { return cmp.Compare(x.Name, y.Name) })
		}
		objects = append(objects, &made[i])
	}
	return objects
}

// nameOn is the name of a partition of one of several GPUs.
func nameOn(t *testing.T, objects []*resourceapi.ResourceSlice, b *Board, gpu, partition int) string {
	t.Helper()
	_, kind, _ := strings.Cut(b.names[partition], "-mig-")
	for _, d := range objects[gpu+1].Spec.Devices { // the first slice has the counters
		if strings.HasSuffix(d.Name, "-mig-"+kind) {
			return d.Name
		}
	}
	t.Fatalf("GPU %d has no %s", gpu, kind)
	return ""
}

// allocate returns what the scheduler takes for a claim, or "".
func allocate(t *testing.T, cache *cel.Cache, objects []*resourceapi.ResourceSlice, b *Board, gpus []Held, profile string) string {
	t.Helper()
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for g, held := range gpus {
		for p := range b.names {
			if held.has(p) {
				state.AllocatedDevices.Insert(structured.MakeDeviceID(driver, "node", nameOn(t, objects, b, g, p)))
			}
		}
	}
	features := structured.Features{PartitionableDevices: true, ConsumableCapacity: true, DeviceTaints: true, PrioritizedList: true}
	allocator, err := structured.NewAllocator(t.Context(), features, state, classes{}, objects, cache)
	if err != nil {
		t.Fatal(err)
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "mig", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf(`device.attributes["gpu.nvidia.com"].profile == %q`, profile),
		}}},
	}}}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) == 0 {
		return ""
	}
	return results[0].Devices.Results[0].Device
}
