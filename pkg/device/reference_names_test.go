// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device_test

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/scale/slices/reference"
)

const (
	publishedDriver = "gpu.nvidia.com"
	publishedNode   = "node-1"
)

// published is what a node publishes in a cluster with all features.
func published(t *testing.T, node *gpu.Node, terms device.Terms, status device.Status) []resourceapi.Device {
	t.Helper()
	inventory, err := device.NewInventory(node, terms)
	if err != nil {
		t.Fatal(err)
	}
	return devicesIn(inventory.With(status).ResourceSlices(device.Options{
		Driver: publishedDriver, Pool: publishedNode, NodeName: publishedNode, PartitionableDevices: true, ConsumableCapacity: true,
	}))
}

func devicesIn(pool []resourceapi.ResourceSlice) (devices []resourceapi.Device) {
	for _, slice := range pool {
		devices = append(devices, slice.Spec.Devices...)
	}
	return devices
}

func typeOf(d *resourceapi.Device) string { return *d.Attributes["type"].StringValue }

// namesOf are the attributes that say something and the capacities of a device.
func namesOf(d *resourceapi.Device) (names []string) {
	for name, value := range d.Attributes {
		if value.StringValue == nil || *value.StringValue != "" {
			names = append(names, string(name))
		}
	}
	for name := range d.Capacity {
		names = append(names, string(name))
	}
	return names
}

// missingNames are the names that NVIDIA's DRA driver publishes for a kind of device and that some board's
// devices of this kind lack, with one of those.
func missingNames(t *testing.T) (missing map[string]string, compared int) {
	t.Helper()
	missing = map[string]string{}
	for _, name := range boards.Names() {
		node, err := boards.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		theirs, withMIG := map[string][]string{}, *node
		withMIG.GPUs = slices.Clone(node.GPUs)
		for i := range withMIG.GPUs {
			withMIG.GPUs[i].MIG = cmp.Or(withMIG.GPUs[i].MIG, &gpu.MIG{}) // what is not there has no partitions
		}
		for _, d := range devicesIn(reference.Pool{Driver: publishedDriver, Node: publishedNode}.ResourceSlices(&withMIG)) {
			theirs[typeOf(&d)] = namesOf(&d)
		}
		for _, d := range published(t, node, device.Terms{}, device.Status{}) {
			for _, attribute := range theirs[typeOf(&d)] {
				compared++
				_, is := d.Attributes[resourceapi.QualifiedName(attribute)]
				_, isCapacity := d.Capacity[resourceapi.QualifiedName(attribute)]
				if !is && !isCapacity {
					missing[typeOf(&d)+" "+path.Base(attribute)] = d.Name + " of " + name
				}
			}
		}
	}
	return missing, compared
}

// TestNamesOfReferenceDriver: a selector that reads a name which a device does not have is an error that ends
// the pod's scheduling. So whole GPUs and partitions have every attribute and capacity that NVIDIA's driver
// gives them.
func TestNamesOfReferenceDriver(t *testing.T) {
	missing, compared := missingNames(t)
	if compared < 2000 {
		t.Errorf("only %d names were compared", compared)
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("NVIDIA's driver publishes %s, and device %s does not have it", name, missing[name])
	}
	t.Logf("%d names compared", compared)
}

// TestWithdrawnDeviceTakesTaints: a device that the policy withdraws and a claim still has is told what becomes
// of its GPU.
func TestWithdrawnDeviceTakesTaints(t *testing.T) {
	node, err := boards.Load("h100")
	if err != nil {
		t.Fatal(err)
	}
	before, kept := published(t, node, device.Terms{}, device.Status{}), map[string]bool{}
	for _, d := range before {
		if typeOf(&d) == "mig" {
			kept[d.Name] = true
		}
	}
	none := &policy.Policy{Default: policy.Offer{Whole: true}}
	lost := device.Status{Conditions: []device.Condition{{PCIAddress: node.GPUs[0].PCIAddress, Reason: device.Lost}}}
	found := 0
	for _, d := range published(t, node, device.Terms{Policy: none, Keep: kept}, lost) {
		if !kept[d.Name] {
			continue
		}
		found++
		if !slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == publishedDriver+"/"+string(device.Lost) }) {
			t.Errorf("device %s was withdrawn and is kept for a claim: its GPU is lost, and it has the taints %v", d.Name, d.Taints)
		}
	}
	if found < 10 {
		t.Errorf("%d devices were kept", found)
	}
}
