// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

func TestMigMode(t *testing.T) {
	holder := func(gpu int) func(*machine.Machine) {
		return func(m *machine.Machine) {
			m.Processes = append(m.Processes, machine.Process{PID: 9, Name: "dcgm", GPU: gpu, InstanceID: -1, ComputeID: -1})
		}
	}
	on := func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true }
	with := func(m *machine.Machine) {
		on(m)
		m.GPUs[0].MIG.Instances = []machine.GPUInstance{{ID: 7, ProfileID: id1g, Placement: machine.Placement{Size: 1}}}
	}
	type modes [2]int
	for name, c := range map[string]struct {
		gpu             machine.GPU
		prepare         func(*machine.Machine)
		mode            int
		ret, activation nvml.Return
		want            modes // current, pending
	}{
		"hopper on":                 {h100(0), nil, 1, nvml.SUCCESS, nvml.SUCCESS, modes{1, 1}},
		"hopper off":                {h100(0), on, 0, nvml.SUCCESS, nvml.SUCCESS, modes{0, 0}},
		"hopper on, held":           {h100(0), holder(0), 1, nvml.SUCCESS, nvml.SUCCESS, modes{1, 1}},
		"hopper off, held":          {h100(0), func(m *machine.Machine) { on(m); holder(0)(m) }, 0, nvml.SUCCESS, nvml.SUCCESS, modes{0, 0}},
		"hopper off, instances":     {h100(0), with, 0, nvml.SUCCESS, nvml.ERROR_IN_USE, modes{1, 1}},
		"hopper on again":           {h100(0), with, 1, nvml.SUCCESS, nvml.SUCCESS, modes{1, 1}},
		"ampere on":                 {a100(0), nil, 1, nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED, modes{0, 1}},
		"ampere on, held":           {a100(0), holder(0), 1, nvml.SUCCESS, nvml.ERROR_IN_USE, modes{0, 1}},
		"ampere off":                {a100(0), on, 0, nvml.SUCCESS, nvml.ERROR_RESET_REQUIRED, modes{1, 0}},
		"ampere takes back pending": {a100(0), func(m *machine.Machine) { m.GPUs[0].MIG.Pending = true }, 0, nvml.SUCCESS, nvml.SUCCESS, modes{0, 0}},
		"no MIG":                    {t4(0), nil, 1, nvml.ERROR_NOT_SUPPORTED, nvml.SUCCESS, modes{}},
		"no such mode":              {h100(0), nil, 2, nvml.ERROR_INVALID_ARGUMENT, nvml.SUCCESS, modes{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, machineOf(c.gpu))
			if c.prepare != nil {
				r.update(c.prepare)
			}
			d := device(t, r.open(), 0)
			activation, ret := d.SetMigMode(c.mode)
			wants(t, "SetMigMode", ret, c.ret)
			if ret == nvml.SUCCESS {
				wants(t, "activation", activation, c.activation)
			}
			current, pending, ret := d.GetMigMode()
			if c.gpu.MIG == nil {
				wants(t, "GetMigMode", ret, nvml.ERROR_NOT_SUPPORTED)
				return
			}
			expect.Equal(t, (modes{current, pending}), c.want, "modes")
		})
	}
}

// text makes a string of a C one; char is unsigned on some architectures.
func text[T int8 | uint8](chars []T) string {
	var b []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

func TestProfiles(t *testing.T) {
	d := device(t, newRoot(t, machineOf(h100(0), t4(1))).open(), 0) // MIG mode is off
	var got []string
	for enum := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(enum)
		v2, ret2 := d.GetGpuInstanceProfileInfoV(enum).V2()
		v3, ret3 := d.GetGpuInstanceProfileInfoV(enum).V3()
		if ret != ret2 || ret != ret3 {
			t.Fatalf("profile %d: versions differ: %v, %v, %v", enum, ret, ret2, ret3)
		}
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue
		}
		wants(t, "GetGpuInstanceProfileInfo", ret, nvml.SUCCESS)
		placements := get(d.GetGpuInstancePossiblePlacements(&info))(t, "GetGpuInstancePossiblePlacements")
		var at []string
		for _, p := range placements {
			at = append(at, fmt.Sprintf("%d:%d", p.Start, p.Size))
		}
		if text(v2.Name[:]) != text(v3.Name[:]) || v2.MemorySizeMB != v3.MemorySizeMB || v3.MemorySizeMB != info.MemorySizeMB {
			t.Errorf("profile %d: versions differ: %+v, %+v", enum, v2, v3)
		}
		got = append(got, fmt.Sprintf("%d id %d %s x%d %d SM %d MiB p2p %d ce %d dec %d jpeg %d ofa %d at %s", enum, info.Id, text(v3.Name[:]),
			info.InstanceCount, info.MultiprocessorCount, info.MemorySizeMB, info.IsP2pSupported, info.CopyEngineCount, info.DecoderCount,
			info.JpegCount, info.OfaCount, strings.Join(at, ",")))
	}
	want := []string{
		"0 id 19 MIG 1g.10gb x7 16 SM 9984 MiB p2p 0 ce 1 dec 1 jpeg 1 ofa 0 at 0:1,1:1,2:1,3:1,4:1,5:1,6:1",
		"1 id 14 MIG 2g.20gb x3 32 SM 20096 MiB p2p 0 ce 2 dec 2 jpeg 2 ofa 0 at 0:2,2:2,4:2",
		"2 id 9 MIG 3g.40gb x2 60 SM 40448 MiB p2p 0 ce 3 dec 3 jpeg 3 ofa 0 at 0:4,4:4",
		"3 id 5 MIG 4g.40gb x1 64 SM 40448 MiB p2p 0 ce 4 dec 4 jpeg 4 ofa 0 at 0:4",
		"4 id 0 MIG 7g.80gb x1 132 SM 81152 MiB p2p 0 ce 8 dec 7 jpeg 7 ofa 1 at 0:8",
		"7 id 20 MIG 1g.10gb+me x1 16 SM 9984 MiB p2p 0 ce 1 dec 1 jpeg 1 ofa 1 at 0:1,1:1,2:1,3:1,4:1,5:1,6:1",
		"9 id 15 MIG 1g.20gb x4 26 SM 20096 MiB p2p 0 ce 1 dec 1 jpeg 1 ofa 0 at 0:2,2:2,4:2,6:2",
	}
	expect.Same(t, got, want, "profiles")
	_, ret := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_COUNT)
	wants(t, "profile past the end", ret, nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "GetGpuInstanceProfileInfoByIdV", code(d.GetGpuInstanceProfileInfoByIdV(id3g).V3()), nvml.SUCCESS)
	wants(t, "unknown id", code(d.GetGpuInstanceProfileInfoByIdV(77).V2()), nvml.ERROR_NOT_SUPPORTED)
}

// TestMigOff: what works on a GPU that is able to MIG but has it off.
func TestMigOff(t *testing.T) {
	_, d := oneH100(t)
	info := profileInfo(t, d, id1g)
	wants(t, "GetGpuInstancePossiblePlacements", code(d.GetGpuInstancePossiblePlacements(info)), nvml.SUCCESS)
	wants(t, "GetGpuInstanceRemainingCapacity", code(d.GetGpuInstanceRemainingCapacity(info)), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "GetGpuInstances", code(d.GetGpuInstances(info)), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "GetGpuInstanceById", code(d.GetGpuInstanceById(7)), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "CreateGpuInstance", code(d.CreateGpuInstance(info)), nvml.ERROR_NOT_SUPPORTED)
	expect.Equal(t, get(d.GetMaxMigDeviceCount())(t, "GetMaxMigDeviceCount"), 0, "MIG devices with MIG mode off")
}

func TestLifeCycle(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	d := device(t, lib, 1)
	enable(t, d)

	gi := createAt(t, d, id3g, place(4, 4))
	info := get(gi.GetInfo())(t, "GetInfo")
	if info.Id != 2 || info.ProfileId != id3g || info.Placement != (nvml.GpuInstancePlacement{Start: 4, Size: 4}) || info.Device != d {
		t.Errorf("GPU instance %+v", info)
	}
	expect.Equal(t, get(d.GetGpuInstanceById(2))(t, "GetGpuInstanceById"), gi, "the same instance has another handle")
	wants(t, "GetGpuInstanceById of none", code(d.GetGpuInstanceById(1)), nvml.ERROR_NOT_FOUND)
	all := get(d.GetGpuInstances(profileInfo(t, d, id3g)))(t, "GetGpuInstances")
	if len(all) != 1 || all[0] != gi {
		t.Errorf("instances of the profile: %v", all)
	}

	ci := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	expect.Same(t, r.capabilities(), capabilitiesOf(r.machine()), "capability files")
	ciInfo := get(ci.GetInfo())(t, "GetInfo")
	first := migDevice(t, lib, d, ciInfo.Device)
	wants(t, "destroy GPU instance with a compute instance", gi.Destroy(), nvml.ERROR_IN_USE)
	wants(t, "destroy compute instance", ci.Destroy(), nvml.SUCCESS)
	wants(t, "destroy it again", ci.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "UUID through a stale handle", code(ciInfo.Device.GetUUID()), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "stale UUID", code(lib.DeviceGetHandleByUUID(first)), nvml.ERROR_NOT_FOUND)

	again := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	againInfo := get(again.GetInfo())(t, "GetInfo")
	expect.Equal(t, migDevice(t, lib, d, againInfo.Device), first, "in the same place the UUID")
	wants(t, "GetInfo of the one before", code(ci.GetInfo()), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "destroy compute instance", again.Destroy(), nvml.SUCCESS)
	wants(t, "destroy GPU instance", gi.Destroy(), nvml.SUCCESS)
	wants(t, "GetInfo through a stale handle", code(gi.GetInfo()), nvml.ERROR_INVALID_ARGUMENT)

	// The id is free again, but the old handle does not come back to life.
	reborn := createAt(t, d, id3g, place(4, 4))
	if info, _ := reborn.GetInfo(); info.Id != 2 {
		t.Errorf("id %d, want the freed 2", info.Id)
	}
	wants(t, "destroy through a stale handle", gi.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "destroy GPU instance", reborn.Destroy(), nvml.SUCCESS)
	expect.Same(t, r.capabilities(), capabilitiesOf(r.machine()), "capability files")
}

// migDevice checks the MIG device of a 3g instance and returns its UUID.
func migDevice(t *testing.T, lib nvml.Interface, parent, mig nvml.Device) string {
	t.Helper()
	is := get(mig.IsMigDeviceHandle())(t, "IsMigDeviceHandle")
	uuid := get(mig.GetUUID())(t, "GetUUID")
	if !is || !strings.HasPrefix(uuid, "MIG-") {
		t.Errorf("MIG device: %v, UUID %s", is, uuid)
	}
	byIndex := get(parent.GetMigDeviceHandleByIndex(0))(t, "GetMigDeviceHandleByIndex")
	byUUID := get(lib.DeviceGetHandleByUUID(uuid))(t, "DeviceGetHandleByUUID")
	up := get(mig.GetDeviceHandleFromMigDeviceHandle())(t, "GetDeviceHandleFromMigDeviceHandle")
	if byIndex != mig || byUUID != mig || up != parent {
		t.Error("handles of one device differ")
	}
	wants(t, "GetMigDeviceHandleByIndex of none", code(parent.GetMigDeviceHandleByIndex(1)), nvml.ERROR_NOT_FOUND)
	_, ret := parent.GetMigDeviceHandleByIndex(7)
	wants(t, "GetMigDeviceHandleByIndex past the end", ret, nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "GetGpuInstanceId of a GPU", code(parent.GetGpuInstanceId()), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "GetAttributes of a GPU", code(parent.GetAttributes()), nvml.ERROR_NOT_SUPPORTED)

	attributes := get(mig.GetAttributes())(t, "GetAttributes")
	want := nvml.DeviceAttributes{
		MultiprocessorCount: 60, SharedCopyEngineCount: 3, SharedDecoderCount: 3, SharedJpegCount: 3,
		GpuInstanceSliceCount: 3, ComputeInstanceSliceCount: 3, MemorySizeMB: 40448,
	}
	expect.Equal(t, attributes, want, "attributes")
	name, _ := mig.GetName()
	memory, _ := mig.GetMemoryInfo()
	if v2, ret := mig.GetMemoryInfo_v2(); ret != nvml.SUCCESS || v2.Reserved != 45*miB || memory.Free != memory.Total-45*miB {
		t.Errorf("%v: %d bytes reserved, %d free of %d", ret, v2.Reserved, memory.Free, memory.Total)
	}
	gi, _ := mig.GetGpuInstanceId()
	ci, _ := mig.GetComputeInstanceId()
	index, _ := mig.GetIndex()
	got := fmt.Sprint(name, ", ", memory.Total/miB, ", ", gi, " ", ci, " ", index)
	expect.Equal(t, got, "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 40448, 2 0 0", "MIG device")
	return uuid
}
