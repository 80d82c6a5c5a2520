// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// How near GPUs are to one another follows from the PCI bus and the NUMA nodes, in both directions.
func TestTopologyCommonAncestor(t *testing.T) {
	at := func(n int, root string, numa int) machine.GPU {
		g := h100(n)
		g.PCIeRoot, g.NUMANode = root, numa
		return g
	}
	behind := at(4, "pci0000:16", 0)
	behind.PCIeSwitch = "0000:17:00.0"
	beside := at(5, "pci0000:16", 0)
	beside.PCIeSwitch = "0000:17:00.0"
	lib := newRoot(t, machineOf(at(0, "pci0000:16", 0), at(1, "pci0000:16", 0), at(2, "pci0000:40", 0), at(3, "pci0000:c0", 1), behind, beside)).open()
	var gpus []nvml.Device
	for i := range 6 {
		d := get(lib.DeviceGetHandleByIndex(i))(t, "DeviceGetHandleByIndex")
		gpus = append(gpus, d)
	}
	for pair, want := range map[[2]int]nvml.GpuTopologyLevel{
		{0, 0}: nvml.TOPOLOGY_INTERNAL,
		{0, 1}: nvml.TOPOLOGY_HOSTBRIDGE,
		{1, 2}: nvml.TOPOLOGY_NODE,
		{2, 3}: nvml.TOPOLOGY_SYSTEM,
		{4, 5}: nvml.TOPOLOGY_SINGLE,
		{0, 4}: nvml.TOPOLOGY_HOSTBRIDGE,
	} {
		for _, p := range [][2]int{pair, {pair[1], pair[0]}} {
			got := get(gpus[p[0]].GetTopologyCommonAncestor(gpus[p[1]]))(t, "GetTopologyCommonAncestor")
			expect.Equal(t, got, want, "GPUs", p)
		}
	}
}

// NVLinks say what they lead to while they are up, which they are not in MIG mode.
func TestNVLinks(t *testing.T) {
	linked, bare := h100(0), t4(1)
	linked.NVLinks = []machine.NVLink{
		{Remote: "0000:1c:00.0"}, {Remote: "0000:07:00.0", RemoteType: 2}, {RemoteType: 2}, {Remote: "0000:1c:00.0", Down: true},
	}
	r := newRoot(t, machineOf(linked, bare))
	lib := r.open()
	d := device(t, lib, 0)
	for link, want := range []struct {
		state   nvml.EnableState
		kind    nvml.IntNvLinkDeviceType
		ret     nvml.Return // of the type
		address string
	}{
		{nvml.FEATURE_ENABLED, nvml.NVLINK_DEVICE_TYPE_GPU, nvml.SUCCESS, "00000000:1C:00.0"},
		{nvml.FEATURE_ENABLED, nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS, "00000000:07:00.0"},
		{nvml.FEATURE_ENABLED, nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS, ""},
		{nvml.FEATURE_DISABLED, 0, nvml.ERROR_NOT_SUPPORTED, ""},
	} {
		state := get(d.GetNvLinkState(link))(t, "GetNvLinkState")
		kind, ret := d.GetNvLinkRemoteDeviceType(link)
		wants(t, "GetNvLinkRemoteDeviceType", ret, want.ret)
		pci, ret := d.GetNvLinkRemotePciInfo(link)
		if want.address == "" {
			wants(t, "GetNvLinkRemotePciInfo", ret, nvml.ERROR_NOT_SUPPORTED)
		} else {
			wants(t, "GetNvLinkRemotePciInfo", ret, nvml.SUCCESS)
		}
		address := make([]byte, 0, len(pci.BusId))
		for _, c := range pci.BusId {
			if c != 0 {
				address = append(address, byte(c))
			}
		}
		if state != want.state || kind != want.kind || string(address) != want.address {
			t.Errorf("link %d: state %v, type %v, address %q", link, state, kind, address)
		}
	}
	wants(t, "a link too many", code(d.GetNvLinkState(4)), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "a GPU without NVLink", code(device(t, lib, 1).GetNvLinkState(0)), nvml.ERROR_NOT_SUPPORTED)
	enable(t, d)
	state := get(d.GetNvLinkState(0))(t, "GetNvLinkState in MIG mode")
	expect.Equal(t, state, nvml.FEATURE_DISABLED, "links are active in MIG mode")
}

// The fabric tells the clique of a GPU that is registered.
func TestFabricInfo(t *testing.T) {
	in, none, local := h100(0), h100(1), h100(2)
	in.Health.Fabric.State, local.Health.Fabric.State = nvml.GPU_FABRIC_STATE_COMPLETED, nvml.GPU_FABRIC_STATE_COMPLETED
	in.Clique = machine.Clique{ClusterUUID: "00112233-4455-6677-8899-aabbccddeeff", ID: 7}
	lib := newRoot(t, machineOf(in, none, local)).open()
	info := get(device(t, lib, 0).GetGpuFabricInfoV().V2())(t, "GetGpuFabricInfoV")
	want := [16]uint8{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	if info.ClusterUuid != want || info.CliqueId != 7 || info.State != nvml.GPU_FABRIC_STATE_COMPLETED {
		t.Errorf("%+v", info)
	}
	older := get(device(t, lib, 0).GetGpuFabricInfo())(t, "GetGpuFabricInfo")
	if older.ClusterUuid != want || older.CliqueId != 7 || older.State != nvml.GPU_FABRIC_STATE_COMPLETED {
		t.Errorf("%+v", older)
	}
	wants(t, "GetGpuFabricInfo without a fabric", code(device(t, lib, 1).GetGpuFabricInfo()), nvml.ERROR_NOT_SUPPORTED)
	_, ret := device(t, lib, 1).GetGpuFabricInfoV().V2()
	wants(t, "GetGpuFabricInfoV without a fabric", ret, nvml.ERROR_NOT_SUPPORTED)
	info = get(device(t, lib, 2).GetGpuFabricInfoV().V2())(t, "GetGpuFabricInfoV of a fabric of one machine")
	if info.ClusterUuid != [16]uint8{} || info.CliqueId != 0 {
		t.Errorf("%+v", info)
	}
}
