// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// Update changes the machine.
func (n *GPUs) Update(t testing.TB, change func(*machine.Machine)) {
	t.Helper()
	err := n.State.Update(func(m *machine.Machine) error {
		change(m)
		return nil
	})
	must.Do(t, err)
}

// Address is the PCI address of a GPU.
func (n *GPUs) Address(t testing.TB, gpu int) string {
	t.Helper()
	return n.Machine(t).GPUs[gpu].PCIAddress
}

// Machine returns the state of the machine.
func (n *GPUs) Machine(t testing.TB) *machine.Machine {
	t.Helper()
	return must.Get(n.State.Snapshot())(t)
}

// Instances are all live GPU instances of the machine.
func (n *GPUs) Instances(t testing.TB) []machine.GPUInstance {
	t.Helper()
	var all []machine.GPUInstance
	for _, g := range n.Machine(t).GPUs {
		if g.MIG != nil {
			all = append(all, g.MIG.Instances...)
		}
	}
	return all
}

// MIGMode reports for every GPU whether MIG mode is on.
func (n *GPUs) MIGMode(t testing.TB) []bool {
	t.Helper()
	var modes []bool
	for _, g := range n.Machine(t).GPUs {
		modes = append(modes, g.MIG != nil && g.MIG.Current)
	}
	return modes
}

const (
	// NVMLRecoveryReset is the nvmlDeviceGpuRecoveryAction_t of a reset.
	NVMLRecoveryReset = 1
	// xidEvent is nvmlEventTypeXidCriticalError.
	xidEvent = 8
)

// SendXID lets the driver report an XID on a GPU instance with its compute instance, or on all
// of the GPU with -1. The driver keeps none for those who listen later.
func (n *GPUs) SendXID(t testing.TB, gpu int, xid uint64, instance int) {
	t.Helper()
	compute := -1
	if instance >= 0 {
		compute = 0
	}
	n.Update(t, func(m *machine.Machine) {
		state.AddEvent(m, machine.Event{GPU: gpu, Type: xidEvent, XID: xid, InstanceID: instance, ComputeID: compute})
	})
}
