// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

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
				_, ret := d.CreateGpuInstanceWithPlacement(profileInfo(t, d, s.id), s.at)
				wants(t, "last create", ret, c.want)
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
	r := newRoot(t, machineOf(h100(0)))
	d := device(t, r.open(), 0)
	enable(t, d)
	info := profileInfo(t, d, id1g)
	idOf := func(gi nvml.GpuInstance) int {
		i, ret := gi.GetInfo()
		wants(t, "GetInfo", ret, nvml.SUCCESS)
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
	if want := []int{13, 7, 8, 9, 10, 11, 12}; !slices.Equal(got, want) {
		t.Errorf("ids %v, want %v", got, want)
	}
	wants(t, "Destroy", all[2].Destroy(), nvml.SUCCESS)
	gi, ret := d.CreateGpuInstance(info)
	wants(t, "CreateGpuInstance", ret, nvml.SUCCESS)
	if idOf(gi) != 9 {
		t.Errorf("id %d, want the freed 9", idOf(gi))
	}
}

func TestRemainingCapacity(t *testing.T) {
	d := device(t, newRoot(t, machineOf(h100(0))).open(), 0)
	enable(t, d)
	check := func(when, want string) {
		t.Helper()
		var got string
		for _, id := range []uint32{id1g, id1gDouble, id2g, id3g, id4g, id7g, id1gMe} {
			n, ret := d.GetGpuInstanceRemainingCapacity(profileInfo(t, d, id))
			wants(t, "GetGpuInstanceRemainingCapacity", ret, nvml.SUCCESS)
			got += fmt.Sprint(n, " ")
		}
		if got != want {
			t.Errorf("%s: capacity %q, want %q", when, got, want)
		}
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
	_, ret = gi.GetComputeInstanceProfileInfo(0, 1)
	wants(t, "engine profile past the end", ret, nvml.ERROR_INVALID_ARGUMENT)
	two := computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE)
	v3, ret := gi.GetComputeInstanceProfileInfoV(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0).V3()
	wants(t, "GetComputeInstanceProfileInfoV", ret, nvml.SUCCESS)
	if two.MultiprocessorCount != 32 || two.SharedDecoderCount != 4 || text(v3.Name[:]) != "MIG 2c.4g.40gb" {
		t.Errorf("profile %+v, name %s", two, text(v3.Name[:]))
	}
	placements, ret := gi.GetComputeInstancePossiblePlacements(two)
	wants(t, "GetComputeInstancePossiblePlacements", ret, nvml.SUCCESS)
	if want := []nvml.ComputeInstancePlacement{{Start: 0, Size: 2}, {Start: 2, Size: 2}}; !slices.Equal(placements, want) {
		t.Errorf("placements %v", placements)
	}
}

func TestComputeInstances(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	d := device(t, r.open(), 0)
	enable(t, d)
	gi := createAt(t, d, id4g, place(0, 4))
	two := computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE)
	upperHalf, unaligned := nvml.ComputeInstancePlacement{Start: 2, Size: 2}, nvml.ComputeInstancePlacement{Start: 1, Size: 2}
	upper, ret := gi.CreateComputeInstanceWithPlacement(two, &upperHalf)
	wants(t, "CreateComputeInstanceWithPlacement", ret, nvml.SUCCESS)
	_, ret = gi.CreateComputeInstanceWithPlacement(two, &upperHalf)
	wants(t, "same place", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	_, ret = gi.CreateComputeInstanceWithPlacement(two, &unaligned)
	wants(t, "unaligned", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = gi.CreateComputeInstance(computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE))
	wants(t, "too large for the rest", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	left, ret := gi.GetComputeInstanceRemainingCapacity(computeProfile(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE))
	wants(t, "GetComputeInstanceRemainingCapacity", ret, nvml.SUCCESS)
	if left != 2 {
		t.Errorf("room for %d more of one slice, want 2", left)
	}

	info, ret := upper.GetInfo()
	wants(t, "GetInfo", ret, nvml.SUCCESS)
	if info.GpuInstance != gi || info.Id != 0 || info.Placement != upperHalf {
		t.Errorf("compute instance %+v", info)
	}
	name, _ := info.Device.GetName()
	attributes, _ := info.Device.GetAttributes()
	got := fmt.Sprint(name, " ", attributes.ComputeInstanceSliceCount, " ", attributes.MultiprocessorCount)
	if want := "NVIDIA H100 80GB HBM3 MIG 2c.4g.40gb 2 32"; got != want {
		t.Errorf("device %q, want %q", got, want)
	}
	wants(t, "SetComputeMode to one process", info.Device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "SetComputeMode", info.Device.SetComputeMode(nvml.COMPUTEMODE_PROHIBITED), nvml.SUCCESS)
	if r.machine().GPUs[0].MIG.Instances[0].Compute[0].ComputeMode != 2 {
		t.Error("the MIG device's compute mode is not in the state")
	}
	byID, ret := gi.GetComputeInstanceById(0)
	wants(t, "GetComputeInstanceById", ret, nvml.SUCCESS)
	list, ret := gi.GetComputeInstances(two)
	wants(t, "GetComputeInstances", ret, nvml.SUCCESS)
	if byID != upper || !slices.Equal(list, []nvml.ComputeInstance{upper}) {
		t.Error("look-ups give another handle")
	}
	_, ret = gi.GetComputeInstanceById(3)
	wants(t, "GetComputeInstanceById of none", ret, nvml.ERROR_NOT_FOUND)
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

	info, ret := ci.GetInfo()
	wants(t, "GetInfo", ret, nvml.SUCCESS)
	for name, dev := range map[string]nvml.Device{"GPU": d, "MIG device": info.Device} {
		list, ret := dev.GetComputeRunningProcesses()
		wants(t, "GetComputeRunningProcesses", ret, nvml.SUCCESS)
		want := []nvml.ProcessInfo{{Pid: 4711, UsedGpuMemory: 256 * miB, GpuInstanceId: 1, ComputeInstanceId: 0}}
		if !slices.Equal(list, want) {
			t.Errorf("%s: processes %+v", name, list)
		}
		graphics, ret := dev.GetGraphicsRunningProcesses()
		wants(t, "GetGraphicsRunningProcesses", ret, nvml.SUCCESS)
		mps, ret := dev.GetMPSComputeRunningProcesses()
		wants(t, "GetMPSComputeRunningProcesses", ret, nvml.SUCCESS)
		if len(graphics)+len(mps) != 0 {
			t.Errorf("%s: processes of other kinds: %v, %v", name, graphics, mps)
		}
	}
	name, ret := lib.SystemGetProcessName(4711)
	wants(t, "SystemGetProcessName", ret, nvml.SUCCESS)
	if name != "python3" {
		t.Errorf("process name %q", name)
	}
	_, ret = lib.SystemGetProcessName(4712)
	wants(t, "SystemGetProcessName of none", ret, nvml.ERROR_NOT_FOUND)
	memory, _ := info.Device.GetMemoryInfo()
	if memory.Used != (45+256)*miB {
		t.Errorf("%d bytes used", memory.Used)
	}
	r.update(func(m *machine.Machine) { m.Processes = nil })
	// The change came through Go; the handles are still good.
	wants(t, "destroy compute instance", ci.Destroy(), nvml.SUCCESS)
	wants(t, "destroy GPU instance", gi.Destroy(), nvml.SUCCESS)
}

// TestReboot: what the Go side clears at a reboot is gone for old handles.
func TestReboot(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	d := device(t, r.open(), 0)
	enable(t, d)
	gi := createAt(t, d, id3g, place(0, 4))
	r.update(func(m *machine.Machine) { m.BootID = "another" })
	_, ret := gi.GetInfo()
	wants(t, "GetInfo through a handle from before", ret, nvml.ERROR_INVALID_ARGUMENT)
}
