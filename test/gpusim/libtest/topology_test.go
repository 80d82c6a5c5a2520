// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// How near GPUs are to one another follows from the PCI bus and the NUMA nodes, in both directions.
func TestTopologyCommonAncestor(t *testing.T) {
	at := func(n int, root string, numa int) machine.GPU {
		g := h100(n)
		g.PCIeRoot, g.NUMANode = root, numa
		return g
	}
	lib := newRoot(t, machineOf(at(0, "pci0000:16", 0), at(1, "pci0000:16", 0), at(2, "pci0000:40", 0), at(3, "pci0000:c0", 1))).open()
	var gpus []nvml.Device
	for i := range 4 {
		d, ret := lib.DeviceGetHandleByIndex(i)
		wants(t, "DeviceGetHandleByIndex", ret, nvml.SUCCESS)
		gpus = append(gpus, d)
	}
	for pair, want := range map[[2]int]nvml.GpuTopologyLevel{
		{0, 0}: nvml.TOPOLOGY_INTERNAL,
		{0, 1}: nvml.TOPOLOGY_HOSTBRIDGE,
		{1, 2}: nvml.TOPOLOGY_NODE,
		{2, 3}: nvml.TOPOLOGY_SYSTEM,
	} {
		for _, p := range [][2]int{pair, {pair[1], pair[0]}} {
			got, ret := gpus[p[0]].GetTopologyCommonAncestor(gpus[p[1]])
			wants(t, "GetTopologyCommonAncestor", ret, nvml.SUCCESS)
			if got != want {
				t.Errorf("GPUs %v: %v, want %v", p, got, want)
			}
		}
	}
}
