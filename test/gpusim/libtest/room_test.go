// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestRoom creates instances in order; the last step is the one looked at.
func TestRoom(t *testing.T) {
	type step struct {
		id uint32
		at *nvml.GpuInstancePlacement
	}
	const (
		some, all, none = 14, 65, 67 // profiles of mediaMIG
	)
	hungry := a100(0)
	hungry.MIG.Profiles[1].Decoders = 3 // of five
	for name, c := range map[string]struct {
		gpu   machine.GPU
		steps []step
		want  nvml.Return
	}{
		"3g beside 4g":           {h100(0), []step{{id4g, place(0, 4)}, {id3g, place(4, 4)}}, nvml.SUCCESS},
		"same place":             {h100(0), []step{{id1g, place(2, 1)}, {id1g, place(2, 1)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"overlap":                {h100(0), []step{{id1g, place(5, 1)}, {id3g, place(4, 4)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"beside whole":           {h100(0), []step{{id7g, place(0, 8)}, {id1g, place(6, 1)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"unaligned":              {h100(0), []step{{id2g, place(1, 2)}}, nvml.ERROR_INVALID_ARGUMENT},
		"wrong size":             {h100(0), []step{{id2g, place(0, 4)}}, nvml.ERROR_INVALID_ARGUMENT},
		"second +me":             {h100(0), []step{{id1gMe, place(0, 1)}, {id1gMe, place(3, 1)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"decoders suffice":       {a100(0), []step{{id3g, place(0, 4)}, {id3g, place(4, 4)}}, nvml.SUCCESS},
		"decoders run out":       {hungry, []step{{id3g, place(0, 4)}, {id3g, place(4, 4)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"all media alone":        {pro(0), []step{{none, place(0, 3)}, {all, place(3, 3)}, {none, place(6, 3)}}, nvml.SUCCESS},
		"some media beside all":  {pro(0), []step{{all, place(0, 3)}, {some, place(3, 3)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"all media beside some":  {pro(0), []step{{some, place(0, 3)}, {all, place(3, 3)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
		"whole beside something": {pro(0), []step{{none, place(9, 3)}, {0, place(0, 12)}}, nvml.ERROR_INSUFFICIENT_RESOURCES},
	} {
		t.Run(name, func(t *testing.T) {
			c.gpu.MIG.Current, c.gpu.MIG.Pending = true, true
			r := newRoot(t, machineOf(c.gpu))
			d := device(t, r.open(), 0)
			for i, s := range c.steps {
				if i < len(c.steps)-1 {
					createAt(t, d, s.id, s.at)
					continue
				}
				wants(t, "last create", code(d.CreateGpuInstanceWithPlacement(profileInfo(t, d, s.id), s.at)), c.want)
			}
			if c.want != nvml.SUCCESS && len(r.machine().GPUs[0].MIG.Instances) != len(c.steps)-1 {
				t.Error("the refused instance is there")
			}
		})
	}
}

// TestInstanceIDs: ids are those of the placements, not 0, 1, 2…; no two live
// instances have the same, and a freed one is used again.
func TestInstanceIDs(t *testing.T) {
	_, d := oneH100(t)
	enable(t, d)
	info := profileInfo(t, d, id1g)
	idOf := func(gi nvml.GpuInstance) int {
		i := get(gi.GetInfo())(t, "GetInfo")
		return int(i.Id)
	}
	me := createAt(t, d, id1gMe, place(6, 1)) // shares its ids with 1g
	got := []int{idOf(me)}
	var all []nvml.GpuInstance
	for {
		gi, ret := d.CreateGpuInstance(info)
		if ret != nvml.SUCCESS {
			wants(t, "create on a full GPU", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
			break
		}
		all, got = append(all, gi), append(got, idOf(gi))
	}
	expect.Same(t, got, []int{13, 7, 8, 9, 10, 11, 12}, "ids")
	wants(t, "Destroy", all[2].Destroy(), nvml.SUCCESS)
	expect.Equal(t, idOf(get(d.CreateGpuInstance(info))(t, "CreateGpuInstance")), 9, "id")
}

func TestRemainingCapacity(t *testing.T) {
	d := device(t, newRoot(t, machineOf(h100(0))).open(), 0)
	enable(t, d)
	check := func(when, want string) {
		t.Helper()
		var got string
		for _, id := range []uint32{id1g, id1gDouble, id2g, id3g, id4g, id7g, id1gMe} {
			n := get(d.GetGpuInstanceRemainingCapacity(profileInfo(t, d, id)))(t, "GetGpuInstanceRemainingCapacity")
			got += fmt.Sprint(n, " ")
		}
		expect.Equal(t, got, want, when, "capacity")
	}
	check("empty", "7 4 3 2 1 1 1 ")
	createAt(t, d, id3g, place(4, 4))
	check("3g at 4", "4 2 2 1 1 0 1 ")
	createAt(t, d, id1gMe, place(1, 1))
	check("and 1g+me at 1", "3 1 1 0 0 0 0 ")
}

// computeProfile is a compute profile by its constant.
func computeProfile(t *testing.T, gi nvml.GpuInstance, enum int) *nvml.ComputeInstanceProfileInfo {
	t.Helper()
	info, ret := gi.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	wants(t, "GetComputeInstanceProfileInfo", ret, nvml.SUCCESS)
	return &info
}

func TestComputeProfiles(t *testing.T) {
	d := device(t, newRoot(t, machineOf(h100(0))).open(), 0)
	enable(t, d)
	gi := createAt(t, d, id4g, place(0, 4))
	_, ret := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 0)
	wants(t, "absent profile", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_COUNT, 0)
	wants(t, "profile past the end", ret, nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "engine profile past the end", code(gi.GetComputeInstanceProfileInfo(0, 1)), nvml.ERROR_INVALID_ARGUMENT)
	two := computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE)
	v3, ret := gi.GetComputeInstanceProfileInfoV(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0).V3()
	wants(t, "GetComputeInstanceProfileInfoV", ret, nvml.SUCCESS)
	if two.MultiprocessorCount != 32 || two.SharedDecoderCount != 4 || text(v3.Name[:]) != "MIG 2c.4g.40gb" {
		t.Errorf("profile %+v, name %s", two, text(v3.Name[:]))
	}
	placements := get(gi.GetComputeInstancePossiblePlacements(two))(t, "GetComputeInstancePossiblePlacements")
	expect.Same(t, placements, []nvml.ComputeInstancePlacement{{Start: 0, Size: 2}, {Start: 2, Size: 2}}, "placements")
}

func TestComputeInstances(t *testing.T) {
	r, d := oneH100(t)
	enable(t, d)
	gi := createAt(t, d, id4g, place(0, 4))
	two := computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE)
	upperHalf, unaligned := nvml.ComputeInstancePlacement{Start: 2, Size: 2}, nvml.ComputeInstancePlacement{Start: 1, Size: 2}
	upper := get(gi.CreateComputeInstanceWithPlacement(two, &upperHalf))(t, "CreateComputeInstanceWithPlacement")
	wants(t, "same place", code(gi.CreateComputeInstanceWithPlacement(two, &upperHalf)), nvml.ERROR_INSUFFICIENT_RESOURCES)
	wants(t, "unaligned", code(gi.CreateComputeInstanceWithPlacement(two, &unaligned)), nvml.ERROR_INVALID_ARGUMENT)
	_, ret := gi.CreateComputeInstance(computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE))
	wants(t, "too large for the rest", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	left, ret := gi.GetComputeInstanceRemainingCapacity(computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE))
	wants(t, "GetComputeInstanceRemainingCapacity", ret, nvml.SUCCESS)
	expect.Equal(t, left, 2, "room for more of one slice")

	info := get(upper.GetInfo())(t, "GetInfo")
	if info.GpuInstance != gi || info.Id != 0 || info.Placement != upperHalf {
		t.Errorf("compute instance %+v", info)
	}
	name, _ := info.Device.GetName()
	attributes, _ := info.Device.GetAttributes()
	got := fmt.Sprint(name, " ", attributes.ComputeInstanceSliceCount, " ", attributes.MultiprocessorCount)
	expect.Equal(t, got, "NVIDIA H100 80GB HBM3 MIG 2c.4g.40gb 2 32", "device")
	wants(t, "SetComputeMode to one process", info.Device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "SetComputeMode", info.Device.SetComputeMode(nvml.COMPUTEMODE_PROHIBITED), nvml.SUCCESS)
	if r.machine().GPUs[0].MIG.Instances[0].Compute[0].ComputeMode != 2 {
		t.Error("the MIG device's compute mode is not in the state")
	}
	byID := get(gi.GetComputeInstanceById(0))(t, "GetComputeInstanceById")
	list := get(gi.GetComputeInstances(two))(t, "GetComputeInstances")
	if byID != upper || !slices.Equal(list, []nvml.ComputeInstance{upper}) {
		t.Error("look-ups give another handle")
	}
	wants(t, "GetComputeInstanceById of none", code(gi.GetComputeInstanceById(3)), nvml.ERROR_NOT_FOUND)
}

func TestProcesses(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	enable(t, d)
	gi := createAt(t, d, id3g, place(0, 4))
	ci := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	r.update(func(m *machine.Machine) {
		m.Processes = []machine.Process{{PID: 4711, Name: "python3", GPU: 0, InstanceID: 1, ComputeID: 0, MemoryBytes: 256 * miB}}
	})
	wants(t, "destroy a held compute instance", ci.Destroy(), nvml.ERROR_IN_USE)
	wants(t, "destroy a held GPU instance", gi.Destroy(), nvml.ERROR_IN_USE)

	info := get(ci.GetInfo())(t, "GetInfo")
	for name, dev := range map[string]nvml.Device{"GPU": d, "MIG device": info.Device} {
		list := get(dev.GetComputeRunningProcesses())(t, "GetComputeRunningProcesses")
		want := []nvml.ProcessInfo{{Pid: 4711, UsedGpuMemory: 256 * miB, GpuInstanceId: 1, ComputeInstanceId: 0}}
		expect.Same(t, list, want, name, "processes")
		graphics := get(dev.GetGraphicsRunningProcesses())(t, "GetGraphicsRunningProcesses")
		mps := get(dev.GetMPSComputeRunningProcesses())(t, "GetMPSComputeRunningProcesses")
		expect.Equal(t, len(graphics)+len(mps), 0, name, "processes of other kinds", graphics, mps)
	}
	name := get(lib.SystemGetProcessName(4711))(t, "SystemGetProcessName")
	expect.Equal(t, name, "python3", "process name")
	wants(t, "SystemGetProcessName of none", code(lib.SystemGetProcessName(4712)), nvml.ERROR_NOT_FOUND)
	memory, _ := info.Device.GetMemoryInfo()
	expect.Equal(t, memory.Used, (45+256)*miB, "bytes used")
	r.update(func(m *machine.Machine) { m.Processes = nil })
	// The change came through Go; the handles are still good.
	wants(t, "destroy compute instance", ci.Destroy(), nvml.SUCCESS)
	wants(t, "destroy GPU instance", gi.Destroy(), nvml.SUCCESS)
}

// TestReboot: what the Go side clears at a reboot is gone for old handles.
func TestReboot(t *testing.T) {
	r, d := oneH100(t)
	enable(t, d)
	gi := createAt(t, d, id3g, place(0, 4))
	r.update(func(m *machine.Machine) { m.BootID = "another" })
	wants(t, "GetInfo through a handle from before", code(gi.GetInfo()), nvml.ERROR_INVALID_ARGUMENT)
}
