// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

const miB = 1 << 20

// Profile ids of boards with seven slices.
const (
	id7g       = 0
	id4g       = 5
	id3g       = 9
	id2g       = 14
	id1gDouble = 15
	id1g       = 19
	id1gMe     = 20
)

// starts makes placements of one size.
func starts(size int, at ...int) []machine.Placement {
	out := make([]machine.Placement, 0, len(at))
	for _, s := range at {
		out = append(out, machine.Placement{Start: s, Size: size})
	}
	return out
}

// compute makes compute profiles: constants and ids follow the slices.
func compute(sms int, slices ...int) []machine.CIProfile {
	enum := map[int]int{1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
	total := slices[len(slices)-1]
	out := make([]machine.CIProfile, 0, len(slices))
	for _, s := range slices {
		out = append(out, machine.CIProfile{
			Enum: enum[s], ID: uint32(enum[s]), Slices: s, MaxInstances: total / s, SMs: sms * s / total,
		})
	}
	return out
}

func h100MIG() *machine.MIG {
	return &machine.MIG{MemorySlices: 8, Profiles: []machine.GIProfile{
		{Enum: 0, ID: id1g, Name: "1g.10gb", Slices: 1, MaxInstances: 7, SMs: 16, CopyEngines: 1, Decoders: 1, JPEG: 1,
			MemoryMiB: 9984, Placements: starts(1, 0, 1, 2, 3, 4, 5, 6), InstanceIDs: []int{7, 8, 9, 10, 11, 12, 13}, Compute: compute(16, 1)},
		{Enum: 7, ID: id1gMe, Name: "1g.10gb+me", Slices: 1, MaxInstances: 1, SMs: 16, CopyEngines: 1, Decoders: 1, JPEG: 1, OFA: 1,
			MemoryMiB: 9984, Placements: starts(1, 0, 1, 2, 3, 4, 5, 6), InstanceIDs: []int{7, 8, 9, 10, 11, 12, 13}, Compute: compute(16, 1)},
		{Enum: 9, ID: id1gDouble, Name: "1g.20gb", Slices: 1, MaxInstances: 4, SMs: 26, CopyEngines: 1, Decoders: 1, JPEG: 1,
			MemoryMiB: 20096, Placements: starts(2, 0, 2, 4, 6), InstanceIDs: []int{3, 4, 5, 6}, Compute: compute(26, 1)},
		{Enum: 1, ID: id2g, Name: "2g.20gb", Slices: 2, MaxInstances: 3, SMs: 32, CopyEngines: 2, Decoders: 2, JPEG: 2,
			MemoryMiB: 20096, Placements: starts(2, 0, 2, 4), InstanceIDs: []int{3, 4, 5}, Compute: compute(32, 1, 2)},
		{Enum: 2, ID: id3g, Name: "3g.40gb", Slices: 3, MaxInstances: 2, SMs: 60, CopyEngines: 3, Decoders: 3, JPEG: 3,
			MemoryMiB: 40448, ReservedMiB: 45, Placements: starts(4, 0, 4), InstanceIDs: []int{1, 2}, Compute: compute(60, 1, 2, 3)},
		{Enum: 3, ID: id4g, Name: "4g.40gb", Slices: 4, MaxInstances: 1, SMs: 64, CopyEngines: 4, Decoders: 4, JPEG: 4,
			MemoryMiB: 40448, Placements: starts(4, 0), InstanceIDs: []int{1, 2}, Compute: compute(64, 1, 2, 4)},
		{Enum: 4, ID: id7g, Name: "7g.80gb", Slices: 7, MaxInstances: 1, SMs: 132, CopyEngines: 8, Decoders: 7, JPEG: 7, OFA: 1,
			MemoryMiB: 81152, Placements: starts(8, 0), InstanceIDs: []int{0}, Compute: compute(132, 1, 2, 3, 4, 7)},
	}}
}

// a100MIG has the engines of an A100 with 40 GB: five decoders for seven
// slices, so that engines run out before slices do.
func a100MIG() *machine.MIG {
	return &machine.MIG{ResetToSwitch: true, MemorySlices: 8, Profiles: []machine.GIProfile{
		{Enum: 0, ID: id1g, Name: "1g.5gb", Slices: 1, MaxInstances: 7, SMs: 14, CopyEngines: 1,
			MemoryMiB: 4864, Placements: starts(1, 0, 1, 2, 3, 4, 5, 6), InstanceIDs: []int{7, 8, 9, 10, 11, 12, 13}, Compute: compute(14, 1)},
		{Enum: 2, ID: id3g, Name: "3g.20gb", Slices: 3, MaxInstances: 2, SMs: 42, CopyEngines: 3, Decoders: 2,
			MemoryMiB: 20096, Placements: starts(4, 0, 4), InstanceIDs: []int{1, 2}, Compute: compute(42, 1, 2, 3)},
		{Enum: 4, ID: id7g, Name: "7g.40gb", Slices: 7, MaxInstances: 1, SMs: 98, CopyEngines: 7, Decoders: 5, JPEG: 1, OFA: 1,
			MemoryMiB: 40448, Placements: starts(8, 0), InstanceIDs: []int{0}, Compute: compute(98, 1, 2, 3, 4, 7)},
	}}
}

// mediaMIG is a board whose profiles differ in media engines only, after the
// RTX PRO 6000: twelve memory slices, three for each compute slice.
func mediaMIG() *machine.MIG {
	profile := func(enum int, id uint32, name string, limit, engines int) machine.GIProfile {
		return machine.GIProfile{
			Enum: enum, ID: id, Name: name, Slices: 1, MaxInstances: limit, SMs: 46, CopyEngines: 1, Decoders: engines,
			Encoders: engines, JPEG: engines, MemoryMiB: 24192, Placements: starts(3, 0, 3, 6, 9),
			InstanceIDs: []int{3, 4, 5, 6}, Compute: compute(46, 1),
		}
	}
	full := profile(3, 0, "4g.96gb", 1, 4)
	full.Slices, full.CopyEngines, full.OFA, full.Placements, full.InstanceIDs = 4, 4, 1, starts(12, 0), []int{0}
	return &machine.MIG{MemorySlices: 12, Profiles: []machine.GIProfile{
		profile(0, 14, "1g.24gb", 4, 1), profile(0x0F, 65, "1g.24gb+me.all", 1, 4), profile(0x0D, 67, "1g.24gb-me", 4, 0), full,
	}}
}

// gpuOf makes the n-th GPU of a machine.
func gpuOf(n int, board string, architecture int, mig *machine.MIG) machine.GPU {
	return machine.GPU{
		Board: board, UUID: fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", n), Serial: fmt.Sprintf("165%010d", n),
		ProductName: "NVIDIA " + board, Brand: 14, Architecture: architecture, ComputeMajor: architecture, ComputeMinor: 0,
		Minor: n, PCIAddress: fmt.Sprintf("0000:%02x:00.0", 0x1b+n), PCIDeviceID: 0x233010de, PCISubsystem: 0x16c110de,
		PCIeRoot: "pci0000:16", NUMANode: n % 2, MemoryBytes: 81559 * miB, ReservedBytes: 600 * miB, Cores: 16896,
		AddressingMode: 1, ECC: 1, MIG: mig,
	}
}

// oneH100 is the root of a machine with one GPU, and that GPU.
func oneH100(t testing.TB) (*root, nvml.Device) {
	t.Helper()
	r := newRoot(t, machineOf(h100(0)))
	return r, device(t, r.open(), 0)
}

func machineOf(gpus ...machine.GPU) *machine.Machine {
	return &machine.Machine{
		Name: "test", DriverVersion: "580.95.05", NVMLVersion: "13.580.95.05", CUDADriverVersion: 13000,
		BootID: "f3b4cf3c-7f3a-4f6c-a1f8-2f4e3dbb4c11", GPUs: gpus,
	}
}

func h100(n int) machine.GPU { return gpuOf(n, "H100 80GB HBM3", 9, h100MIG()) }
func a100(n int) machine.GPU { return gpuOf(n, "A100-SXM4-40GB", 7, a100MIG()) }
func pro(n int) machine.GPU  { return gpuOf(n, "RTX PRO 6000", 10, mediaMIG()) }

// t4 has no MIG, no ECC and reports no addressing mode.
func t4(n int) machine.GPU {
	g := gpuOf(n, "T4", 6, nil)
	g.ECC, g.AddressingMode = -1, -1
	return g
}
