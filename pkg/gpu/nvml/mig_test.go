// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	fatal "github.com/partage-dev/partage/test/must"
)

func TestSetMIGMode(t *testing.T) {
	switches := func(d *fakeDevice, mode int) (nvml.Return, nvml.Return) {
		d.current, d.pending = mode, mode
		return nvml.SUCCESS, nvml.SUCCESS
	}
	pends := func(activation nvml.Return) func(*fakeDevice, int) (nvml.Return, nvml.Return) {
		return func(d *fakeDevice, mode int) (nvml.Return, nvml.Return) {
			d.pending = mode
			return activation, nvml.SUCCESS
		}
	}
	tests := map[string]struct {
		device *fakeDevice
		off    bool
		is     error
		says   string
	}{
		"on":         {device: &fakeDevice{mig: true, setMode: switches}},
		"off":        {device: &fakeDevice{mig: true, current: 1, pending: 1, setMode: switches}, off: true},
		"on already": {device: &fakeDevice{mig: true, current: 1, pending: 1}},
		"takes back what is pending": {
			device: &fakeDevice{mig: true, current: 0, pending: 1, setMode: switches}, off: true,
		},
		"no MIG": {device: &fakeDevice{}, is: gpu.ErrNotSupported},
		"refused": {
			device: &fakeDevice{mig: true, setMode: func(*fakeDevice, int) (nvml.Return, nvml.Return) {
				return nvml.SUCCESS, nvml.ERROR_NO_PERMISSION
			}},
			is: gpu.ErrNoPermission, says: pci,
		},
		"in use":                    {device: &fakeDevice{mig: true, setMode: pends(nvml.ERROR_IN_USE)}, is: gpu.ErrInUse, says: "activation"},
		"reset required":            {device: &fakeDevice{mig: true, setMode: pends(nvml.ERROR_RESET_REQUIRED)}, is: gpu.ErrResetRequired},
		"pending, reported success": {device: &fakeDevice{mig: true, setMode: pends(nvml.SUCCESS)}, is: gpu.ErrResetRequired},
		"success that changes nothing": {
			device: &fakeDevice{mig: true, setMode: func(*fakeDevice, int) (nvml.Return, nvml.Return) {
				return nvml.SUCCESS, nvml.SUCCESS
			}},
			says: "still off",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.device.busID = busID
			c := openFake(t, &fakeLibrary{devices: []*fakeDevice{test.device}})
			err := c.SetMIGMode(t.Context(), pci, !test.off)
			if test.is == nil && test.says == "" {
				expect.Do(t, err)
				return
			}
			if err == nil || (test.is != nil && !errors.Is(err, test.is)) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v does not wrap %v and say %q", err, test.is, test.says)
			}
		})
	}
}

// TestReservedMemory: what the driver keeps of a GPU is read where the library tells, and
// not while MIG is on.
func TestReservedMemory(t *testing.T) {
	const reserved = 480 * mib
	for name, test := range map[string]struct {
		change  func(d *fakeDevice)
		missing []string
		want    uint64
		calls   int
	}{
		"MIG is off":       {func(*fakeDevice) {}, nil, reserved, 1},
		"MIG is on":        {func(d *fakeDevice) { d.current, d.pending = 1, 1 }, nil, 0, 0},
		"no MIG":           {func(d *fakeDevice) { d.mig = false }, nil, reserved, 1},
		"not supported":    {func(d *fakeDevice) { d.reserved = 0 }, nil, 0, 1},
		"an older library": {func(*fakeDevice) {}, []string{"nvmlDeviceGetMemoryInfo_v2"}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := h100()
			d.reserved = reserved
			test.change(d)
			node, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{d}, missing: test.missing}).Discover(t.Context())
			if err != nil || len(node.GPUs) != 1 {
				t.Fatalf("%+v, %v", node, err)
			}
			if got := node.GPUs[0].ReservedBytes; got != test.want || d.count("GetMemoryInfo_v2") != test.calls {
				t.Errorf("%d bytes, %d calls", got, d.count("GetMemoryInfo_v2"))
			}
		})
	}
}

func profile(id, slices, instances, sms, decoders uint32, memoryMiB uint64) nvml.GpuInstanceProfileInfo {
	return nvml.GpuInstanceProfileInfo{
		Id: id, SliceCount: slices, InstanceCount: instances, MultiprocessorCount: sms,
		DecoderCount: decoders, MemorySizeMB: memoryMiB,
	}
}

// h100 is a board with two names for one profile, one profile that fits
// nowhere and one that is newer than this code.
func h100() *fakeDevice {
	return &fakeDevice{
		busID: busID, mig: true, arch: nvml.DEVICE_ARCH_HOPPER, memory: 81559 * mib,
		lastEnum: 20,
		profiles: map[int]nvml.GpuInstanceProfileInfo{
			nvml.GPU_INSTANCE_PROFILE_1_SLICE:     profile(19, 1, 7, 16, 1, 9984),
			nvml.GPU_INSTANCE_PROFILE_7_SLICE:     profile(0, 7, 1, 132, 7, 81152),
			nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX: profile(19, 1, 7, 0, 0, 0),
			nvml.GPU_INSTANCE_PROFILE_8_SLICE:     profile(77, 8, 1, 0, 0, 0),
			19:                                    profile(40, 2, 3, 32, 8, 20096),
		},
		placements: map[uint32][]nvml.GpuInstancePlacement{
			19: {{Start: 6, Size: 1}, {Start: 0, Size: 1}, {Start: 0, Size: 1}},
			0:  {{Start: 0, Size: 8}},
			40: {{Start: 2, Size: 2}},
		},
	}
}

func TestDiscoverMIG(t *testing.T) {
	vgpu, ampere, withoutArch := h100(), h100(), h100()
	vgpu.virtualization = nvml.GPU_VIRTUALIZATION_MODE_VGPU
	ampere.arch = nvml.DEVICE_ARCH_AMPERE
	withoutArch.arch = 0
	dynamic := map[string]struct {
		device *fakeDevice
		want   bool
	}{
		"Hopper": {h100(), true}, "vGPU guest": {vgpu, false}, "Ampere": {ampere, false}, "not told": {withoutArch, false},
	}
	for name, test := range dynamic {
		t.Run(name, func(t *testing.T) {
			node, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{test.device}}).Discover(t.Context())
			if err != nil || len(node.GPUs) != 1 || node.GPUs[0].MIG == nil {
				t.Fatalf("%+v, %v", node, err)
			}
			expect.Equal(t, node.GPUs[0].MIG.Dynamic, test.want, "dynamic")
		})
	}

	node := fatal.Get(openFake(t, &fakeLibrary{devices: []*fakeDevice{h100()}}).Discover(t.Context()))(t)
	want := &gpu.MIG{Dynamic: true, MemorySlices: 8, Profiles: []gpu.Profile{
		{
			ID: 0, Name: "7g.id0", Slices: 7, MaxInstances: 1,
			Resources:  gpu.Resources{MemoryBytes: 81152 * mib, Multiprocessors: 132, Decoders: 7},
			Placements: []gpu.Placement{{Start: 0, Size: 8}},
		},
		{
			ID: 19, Name: "1g.id19", Slices: 1, MaxInstances: 7,
			Resources:  gpu.Resources{MemoryBytes: 9984 * mib, Multiprocessors: 16, Decoders: 1},
			Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 6, Size: 1}},
		},
		{
			ID: 40, Name: "2g.id40", Slices: 2, MaxInstances: 3,
			Resources:  gpu.Resources{MemoryBytes: 20096 * mib, Multiprocessors: 32, Decoders: 8},
			Placements: []gpu.Placement{{Start: 2, Size: 2}},
		},
	}}
	expect.Same(t, node.GPUs[0].MIG, want, "MIG")
	whole := gpu.Resources{MemoryBytes: 81559 * mib, Multiprocessors: 132, Decoders: 8}
	expect.Same(t, node.GPUs[0].Resources, whole, "whole GPU")
}

// A GPU whose MIG facts cannot be read must not be offered undivided.
func TestDiscoverMIGFailure(t *testing.T) {
	device := h100()
	device.profiles, device.lastEnum = nil, -1
	node, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}}).Discover(t.Context())
	if err != nil || len(node.GPUs) != 0 || len(node.Broken) != 1 || node.Broken[0].PCIAddress != pci {
		t.Errorf("%+v, %v", node, err)
	}
}

func TestComputeInstanceProfile(t *testing.T) {
	type infos = map[int]nvml.ComputeInstanceProfileInfo
	tests := map[string]struct {
		profile uint32
		compute infos
		want    uint32
		is      error
	}{
		"seven slices, not NVL": {profile: 0, want: 4, compute: infos{
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE:     {Id: 0, SliceCount: 1},
			nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL: {Id: 8, SliceCount: 7},
			nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE:     {Id: 4, SliceCount: 7},
		}},
		"seven slices, only NVL": {profile: 0, want: 8, compute: infos{
			nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL: {Id: 8, SliceCount: 7},
		}},
		"one slice, not revision 1": {profile: 19, want: 0, compute: infos{
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE:      {Id: 0, SliceCount: 1},
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: {Id: 7, SliceCount: 1},
		}},
		"one slice with double memory, revision 1 has all multiprocessors": {profile: 19, want: 7, compute: infos{
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE:      {Id: 0, SliceCount: 1, MultiprocessorCount: 16},
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: {Id: 7, SliceCount: 1, MultiprocessorCount: 26},
		}},
		"none is whole": {profile: 0, is: gpu.ErrNotSupported, compute: infos{
			nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE: {Id: 0, SliceCount: 1},
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			device := h100()
			device.current = 1
			instance := &fakeInstance{device: device, id: 9, profile: test.profile, compute: test.compute, uuid: "MIG-1"}
			device.instances = []*fakeInstance{instance}
			got, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}}).CreateComputeInstance(t.Context(), pci, 9)
			if !errors.Is(err, test.is) {
				t.Fatalf("got %v", err)
			}
			if test.is != nil {
				return
			}
			if diff := cmp.Diff([]uint32{test.want}, instance.created); diff != "" || got.UUID != "MIG-1" {
				t.Errorf("created %v, %+v", instance.created, got)
			}
		})
	}
}

// What was created and cannot be described does not stay.
func TestCreationIsUndone(t *testing.T) {
	device := h100()
	device.current, device.infoResult = 1, nvml.ERROR_UNKNOWN
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
	for looks, want := range map[int]error{
		1000: gpu.ErrUnknown,
		// The caller's time is up after the handle was found and the instance
		// was made, which is no excuse.
		4: context.DeadlineExceeded,
	} {
		c.lib.handles = map[string]*handle{}
		_, err := c.CreateInstance(&expiring{t.Context(), looks}, pci, 19, gpu.Placement{Start: 4, Size: 1})
		expect.Is(t, err, want)
		expect.Equal(t, len(device.instances), 0, "left", device.instances)
	}
	if made, gone := device.count("CreateGpuInstanceWithPlacement"), device.count("instance Destroy"); made != 2 || gone != 2 {
		t.Errorf("%d created, %d destroyed", made, gone)
	}

	parent := &fakeInstance{device: device, id: 9, profile: 19, uuid: "GPU-of-an-old-driver", compute: map[int]nvml.ComputeInstanceProfileInfo{
		nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE: {Id: 0, SliceCount: 1},
	}}
	device.instances = []*fakeInstance{parent}
	if _, err := c.CreateComputeInstance(t.Context(), pci, 9); err == nil || parent.destroyed != 1 {
		t.Errorf("%d destroyed, %v", parent.destroyed, err)
	}
}

// expiring is a context whose deadline comes after it was asked so many times.
type expiring struct {
	context.Context
	looks int
}

func (c *expiring) Err() error {
	if c.looks--; c.looks < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

func TestAbsentInstance(t *testing.T) {
	device := h100()
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
	for _, mode := range []int{nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_ENABLE} {
		device.current = mode
		expect.Is(t, c.DestroyInstance(t.Context(), pci, 9), gpu.ErrNotFound, "mode", mode)
		expect.Is(t, c.DestroyComputeInstance(t.Context(), pci, 9, 0), gpu.ErrNotFound, "mode", mode)
	}
}

// An instance that stays after a success is not taken for gone, nor one of which nothing is known.
func TestDestroyIsReadBack(t *testing.T) {
	device := h100()
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
	for name, test := range map[string]struct {
		stays    bool
		modeGoes bool
		says     string
	}{
		"goes":                   {},
		"stays":                  {stays: true, says: "still there"},
		"nothing is known of it": {modeGoes: true, says: "nvmlDeviceGetGpuInstanceById"},
	} {
		t.Run(name, func(t *testing.T) {
			device.current = nvml.DEVICE_MIG_ENABLE
			device.instances = []*fakeInstance{{device: device, id: 9, stays: test.stays, modeGoes: test.modeGoes}}
			err := c.DestroyInstance(t.Context(), pci, 9)
			if (err != nil) != (test.says != "") || err != nil && !strings.Contains(err.Error(), test.says) || errors.Is(err, gpu.ErrNotFound) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A driver that cannot list compute processes does not say that there are none.
func TestProcessesNotSupported(t *testing.T) {
	device := &fakeDevice{busID: busID, processesResult: nvml.ERROR_NOT_SUPPORTED}
	got, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}}).Processes(t.Context(), pci)
	if !errors.Is(err, gpu.ErrNotSupported) || len(got) > 0 {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestProcesses(t *testing.T) {
	device := &fakeDevice{busID: busID, processes: []nvml.ProcessInfo{
		{Pid: 9, GpuInstanceId: 7}, {Pid: 9, GpuInstanceId: 7}, {Pid: 8, GpuInstanceId: 7}, {Pid: 9, GpuInstanceId: noInstance},
	}}
	got, err := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}}).Processes(t.Context(), pci)
	want := []gpu.Process{{PID: 9, InstanceID: -1}, {PID: 8, InstanceID: 7}, {PID: 9, InstanceID: 7}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
}
