// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package validation lets the code of a real API server judge what is published, and pods by the chart's policies. It is a
// module of its own because the driver does not depend on k8s.io/kubernetes.
package validation

import (
	"fmt"
	"math"
	"os"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/kubernetes/pkg/apis/resource"
	resourcev1 "k8s.io/kubernetes/pkg/apis/resource/v1"
	"k8s.io/kubernetes/pkg/apis/resource/validation"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

const (
	// gpusOfNode is the most that a machine has.
	gpusOfNode = 16
	// sampled is of how many policies one is tried without PARTAGE_TEST_ALL.
	sampled = 4
	// leastSlices is about four fifths of how many there are with all policies: 63,772 of 13 boards.
	leastSlices = 51_000
)

// features are what clusters of several versions can do.
var features = []device.Options{
	{PartitionableDevices: true, ConsumableCapacity: true},
	{PartitionableDevices: true, ConsumableCapacity: true, NoShareCounters: true},
	{PartitionableDevices: true},
	{ConsumableCapacity: true, NoEffectNone: true},
	{},
}

// reasons are all that taint devices, together more than a device can have at a time.
var reasons = []device.Reason{
	device.Occupied, device.ReleasePending, device.Unresponsive, device.Lost, device.ResetRequired, device.RecoveryRequired, device.XID,
	device.UncorrectedECC, device.RowRemapPending, device.RowRemapFailed, device.MemoryUnrepairable, device.FabricUnhealthy, device.Throttled,
	device.Unmonitored, device.MPSUnhealthy, device.MPSUnavailable, device.ForeignClaim, device.Withdrawn,
}

// tally counts what was judged, and keeps a few of the complaints of each kind.
type tally struct {
	slices, devices, invalid int
	kinds                    map[string]int
}

// judge validates a slice as the API server does before it stores it.
func (c *tally) judge(t *testing.T, about string, slice *resourceapi.ResourceSlice) {
	t.Helper()
	var in resource.ResourceSlice
	if err := resourcev1.Convert_v1_ResourceSlice_To_resource_ResourceSlice(slice, &in, nil); err != nil {
		t.Fatal(err)
	}
	c.slices++
	c.devices += len(in.Spec.Devices)
	errs := validation.ValidateResourceSlice(&in)
	if len(errs) == 0 {
		return
	}
	c.invalid++
	const shown = 2
	if kind := string(errs[0].Type) + errs[0].Detail; c.kinds[kind] < shown {
		c.kinds[kind]++
		t.Errorf("%s: the API server refuses slice %s for %d reasons, the first: %v", about, slice.Name, len(errs), errs[0])
	}
}

// replicate makes a node with many GPUs of one with a GPU.
func replicate(node *gpu.Node) *gpu.Node {
	many := *node
	many.GPUs = nil
	for i := range gpusOfNode {
		g := node.GPUs[0]
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", 0x1b+0x0d*i)
		g.UUID = fmt.Sprintf("%s%02d", g.UUID[:len(g.UUID)-2], i)
		g.Minor = i
		many.GPUs = append(many.GPUs, g)
	}
	return &many
}

// nodes are one of a board, and another with MIG mode on where that cannot follow the claims.
func nodes(t *testing.T, board string) map[string]*gpu.Node {
	t.Helper()
	base, err := boards.Load(board)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*gpu.Node{board: replicate(base)}
	if mig := base.GPUs[0].MIG; mig != nil && !mig.Dynamic {
		on := *mig
		on.Enabled = true
		base.GPUs[0].MIG = &on
		all[board+" in MIG mode"] = replicate(base)
	}
	return all
}

// TestSlicesAreValid: every board, with random policies, claims of earlier policies and everything that can be wrong with a
// GPU, publishes slices that an API server stores.
func TestSlicesAreValid(t *testing.T) {
	every := sampled
	if os.Getenv("PARTAGE_TEST_ALL") != "" {
		every = 1
	}
	total := tally{kinds: map[string]int{}}
	for _, board := range boards.Names() {
		for name, node := range nodes(t, board) {
			judgeNode(t, &total, name, node, every)
		}
	}
	t.Logf("%d slices with %d devices, one policy of %d; %d are invalid", total.slices, total.devices, every, total.invalid)
	if total.invalid > 0 {
		t.Errorf("%d of %d slices are invalid", total.invalid, total.slices)
	}
	if total.slices < leastSlices/every {
		t.Errorf("only %d slices", total.slices)
	}
}

func judgeNode(t *testing.T, total *tally, name string, node *gpu.Node, every int) {
	t.Helper()
	const withHeldDevices, withFaults = 3, 2
	held := map[string]bool{}
	all := policies(node)
	for n := range len(all) / every {
		p := all[n*every]
		terms := device.Terms{Policy: p, Limited: n%2 == 0}
		if n%withHeldDevices == 0 {
			terms.Keep = held
		}
		inventory, err := device.NewInventory(node, terms)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range inventory.Devices() {
			held[d.Name] = true
		}
		if n%withFaults == 1 {
			var faults device.Status
			for _, reason := range reasons {
				faults.Conditions = append(faults.Conditions, device.Condition{PCIAddress: node.GPUs[0].PCIAddress, Reason: reason, Value: fmt.Sprint(math.MaxUint32)})
			}
			inventory = inventory.With(faults)
		}
		for _, o := range features {
			o.Driver, o.Pool, o.NodeName = "gpu.nvidia.com", "n1", "n1"
			for _, slice := range inventory.ResourceSlices(o) {
				total.judge(t, fmt.Sprintf("%s, policy %d %+v, %+v", name, n, p, o), &slice)
			}
		}
	}
}
