// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestPCIAddress(t *testing.T) {
	tests := map[string]struct {
		busID, want string
		fails       bool
	}{
		"as NVML writes it":              {busID: "00000000:1B:00.0", want: "0000:1b:00.0"},
		"as the kernel does":             {busID: "0000:1b:00.0", want: "0000:1b:00.0"},
		"domain":                         {busID: "00000001:C1:02.3", want: "0001:c1:02.3"},
		"domain of a machine in a cloud": {busID: "00009C2B:00:00.0", want: "9c2b:00:00.0"},
		"more than 16 bits":              {busID: "00010000:E1:00.0", want: "10000:e1:00.0"},
		"empty":                          {fails: true},
		"no function":                    {busID: "0000:1b:00", fails: true},
		"no domain":                      {busID: "1b:00.0", fails: true},
		"not hexadecimal":                {busID: "0000:xx:00.0", fails: true},
		"too large":                      {busID: "100000000:1b:00.0", fails: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := pciAddress(test.busID)
			if got != test.want || (err != nil) != test.fails {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestPCIDeviceID(t *testing.T) {
	for combined, want := range map[uint32]string{0x233010de: "10de:2330", 0x00fa10de: "10de:00fa", 0: ""} {
		if got := pciDeviceID(combined); got != want {
			t.Errorf("%#x: got %q, want %q", combined, got, want)
		}
	}
}

// Names that drivers print for these sizes, in MiB as reported by boards.
func TestComputedProfileName(t *testing.T) {
	tests := map[string]struct {
		enum                int
		slices              uint32
		memoryMiB, totalMiB uint64
	}{
		"1g.5gb":         {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE, slices: 1, memoryMiB: 4864, totalMiB: 40960},
		"1g.5gb+me":      {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, slices: 1, memoryMiB: 4864, totalMiB: 40960},
		"3g.20gb":        {enum: nvml.GPU_INSTANCE_PROFILE_3_SLICE, slices: 3, memoryMiB: 20096, totalMiB: 40960},
		"7g.80gb":        {enum: nvml.GPU_INSTANCE_PROFILE_7_SLICE, slices: 7, memoryMiB: 81152, totalMiB: 81559},
		"1g.20gb":        {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, slices: 1, memoryMiB: 20096, totalMiB: 81559},
		"1g.18gb":        {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE, slices: 1, memoryMiB: 16384, totalMiB: 143771},
		"3g.71gb":        {enum: nvml.GPU_INSTANCE_PROFILE_3_SLICE, slices: 3, memoryMiB: 71168, totalMiB: 143771},
		"1g.24gb-me":     {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, slices: 1, memoryMiB: 24192, totalMiB: 97887},
		"2g.48gb+gfx":    {enum: nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX, slices: 2, memoryMiB: 48512, totalMiB: 97887},
		"1g.24gb+me.all": {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, slices: 1, memoryMiB: 24192, totalMiB: 97887},
		"1g.0gb":         {enum: nvml.GPU_INSTANCE_PROFILE_1_SLICE, slices: 1},
	}
	for want, test := range tests {
		t.Run(want, func(t *testing.T) {
			p := instanceProfile{enum: test.enum, info: nvml.GpuInstanceProfileInfo{
				SliceCount: test.slices, MemorySizeMB: test.memoryMiB,
			}}
			if got := computedProfileName(p, test.totalMiB*mib); got != want {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestLibraryVersion(t *testing.T) {
	tests := map[string]string{
		"/usr/lib64/libnvidia-ml.so.580.95.05": "580.95.05",
		"/usr/lib64/libnvidia-ml.so.1":         "",
		"libnvidia-ml.so":                      "",
		"":                                     "",
	}
	for path, want := range tests {
		if got := libraryVersion(path); got != want {
			t.Errorf("%q: got %q, want %q", path, got, want)
		}
	}
}
