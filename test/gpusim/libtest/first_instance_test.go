// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestFirstInstance: where the MIG mode changes without a reset, it does so whoever uses the GPU. Who has a context is
// then in the way of the first GPU instance, and of no other; who only has the GPU open is in nobody's way.
func TestFirstInstance(t *testing.T) {
	processes := map[string]struct {
		machine.Process
		want nvml.Return
	}{
		"memory":             {machine.Process{MemoryBytes: miB}, nvml.ERROR_IN_USE},
		"a context":          {machine.Process{}, nvml.ERROR_IN_USE},
		"an MPS server":      {machine.Process{Kind: machine.MPSServer}, nvml.ERROR_IN_USE},
		"an open node":       {machine.Process{Kind: machine.Handle}, nvml.SUCCESS},
		"on the other GPU":   {machine.Process{GPU: 1, MemoryBytes: miB}, nvml.SUCCESS},
		"nobody, after some": {machine.Process{PID: -1}, nvml.SUCCESS},
	}
	for _, name := range slices.Sorted(maps.Keys(processes)) {
		c := processes[name]
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, machineOf(h100(0), h100(1)))
			d := device(t, r.open(), 0)
			p := c.Process
			p.Name, p.InstanceID, p.ComputeID = "train", -1, -1
			if p.PID == 0 {
				p.PID = 9
				r.update(func(m *machine.Machine) { m.Processes = []machine.Process{p} })
			}
			enable(t, d)
			info := profileInfo(t, d, id1g)
			first, ret := d.CreateGpuInstanceWithPlacement(info, place(0, 1))
			wants(t, "the first instance", ret, c.want)
			if current, _, _ := d.GetMigMode(); current != nvml.DEVICE_MIG_ENABLE {
				t.Error("MIG mode is off")
			}
			if ret == nvml.SUCCESS {
				wants(t, "destroy it", first.Destroy(), nvml.SUCCESS)
			}
			r.update(func(m *machine.Machine) { m.Processes = nil })
			createAt(t, d, id1g, place(0, 1))
			r.update(func(m *machine.Machine) { m.Processes = []machine.Process{p} })
			createAt(t, d, id1g, place(1, 1))
		})
	}
}

// TestComputeModeStays: the compute mode is kept while the MIG mode changes, and cannot be changed while it is on.
func TestComputeModeStays(t *testing.T) {
	_, d := oneH100(t)
	wants(t, "SetComputeMode", d.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
	enable(t, d)
	mode := get(d.GetComputeMode())(t, "GetComputeMode")
	expect.Equal(t, mode, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, "the compute mode with MIG mode on")
	wants(t, "SetComputeMode with MIG mode on", d.SetComputeMode(nvml.COMPUTEMODE_DEFAULT), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "SetMigMode", code(d.SetMigMode(nvml.DEVICE_MIG_DISABLE)), nvml.SUCCESS)
	mode = get(d.GetComputeMode())(t, "GetComputeMode")
	expect.Equal(t, mode, nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, "the compute mode afterwards")
}

// TestUUIDsFollowFromThePlace: a partition has the UUID of its place, whoever makes it and whenever; different places have
// different ones, as have the compute instances of one GPU instance.
func TestUUIDsFollowFromThePlace(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	type at struct{ gpu, gi, ci int }
	round := func() map[at]string {
		uuids := map[at]string{}
		for gpu := range 2 {
			d := device(t, lib, gpu)
			enable(t, d)
			for start := range uint32(4) {
				createCompute(t, createAt(t, d, id1g, place(start, 1)), nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
			}
			three := createAt(t, d, id3g, place(4, 4))
			for range 3 {
				createCompute(t, three, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
			}
		}
		for gpu, g := range r.machine().GPUs {
			for _, in := range g.MIG.Instances {
				for _, ci := range in.Compute {
					uuids[at{gpu, in.ID, ci.ID}] = ci.UUID
				}
			}
		}
		return uuids
	}
	first := round()
	different := map[string]bool{}
	for _, uuid := range first {
		different[uuid] = true
	}
	if len(first) != 14 || len(different) != 14 {
		t.Errorf("%d compute instances have %d UUIDs: %v", len(first), len(different), first)
	}
	r.update(func(m *machine.Machine) {
		for i := range m.GPUs {
			m.GPUs[i].Reset()
		}
	})
	expect.Same(t, first, round(), "UUIDs after a reset")
}

// TestInstanceIDOrders: which id an instance has depends on its place, and on which half of the GPU the driver numbers first.
func TestInstanceIDOrders(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*machine.MIG)
		want   []string
	}{
		"lower half first": {func(*machine.MIG) {}, []string{
			"1g.10gb: 0→7 1→8 2→9 3→10 4→11 5→12 6→13", "1g.20gb: 0→3 2→4 4→5 6→6", "2g.20gb: 0→3 2→4 4→5",
			"3g.40gb: 0→1 4→2", "4g.40gb: 0→1", "7g.80gb: 0→0",
		}},
		"upper half first": {(*machine.MIG).UpperHalfFirst, []string{
			"1g.10gb: 0→11 1→12 2→13 3→14 4→7 5→8 6→9", "1g.20gb: 0→5 2→6 4→3 6→4", "2g.20gb: 0→5 2→6 4→3",
			"3g.40gb: 0→2 4→1", "4g.40gb: 0→2", "7g.80gb: 0→0",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := must.Get(catalog.Machine("h100-80-sxmx1", catalog.Options{}))(t)
			test.change(m.GPUs[0].MIG)
			d := device(t, newRoot(t, m).open(), 0)
			enable(t, d)
			var got []string
			for _, p := range m.GPUs[0].MIG.Profiles {
				if p.Enum == nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1 {
					continue // as 1g.10gb
				}
				line := p.Name + ":"
				for _, at := range p.Placements {
					gi := createAt(t, d, p.ID, place(uint32(at.Start), uint32(at.Size)))
					info := get(gi.GetInfo())(t, "GetInfo")
					line += fmt.Sprintf(" %d→%d", at.Start, info.Id)
					wants(t, "Destroy", gi.Destroy(), nvml.SUCCESS)
				}
				got = append(got, line)
			}
			expect.Same(t, got, test.want, "ids")
		})
	}
}
