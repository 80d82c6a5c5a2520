// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// The library and the catalogue have the hardware's rules each for themselves.
// Whatever instances a GPU has, they agree on which profiles it has room for.
func TestLibraryAgreesWithCatalogue(t *testing.T) {
	n := newNode(t, "mixed", nil)
	f, err := state.Open(sysroot.StatePath(n.root))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// In this process only this test may load the library: the first copy
	// that is loaded serves all calls.
	lib := nvml.New(nvml.WithLibraryPath(filepath.Join(sysroot.LibraryDir(n.root), libraryName)))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(lib.ErrorString(ret))
	}
	defer func() { _ = lib.Shutdown() }()
	for i, g := range n.machine().GPUs {
		if g.MIG == nil {
			continue
		}
		device, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			t.Fatal(lib.ErrorString(ret))
		}
		layouts := catalog.Layouts(&g)
		step := 1 + len(layouts)/150 // a sample, spread over all
		for l := 0; l < len(layouts); l += step {
			put(t, f, i, layouts[l])
			for _, p := range g.MIG.Profiles {
				room := 0
				for _, at := range p.Placements {
					next := append(layouts[l][:len(layouts[l]):len(layouts[l])], catalog.Instance{ProfileID: p.ID, Placement: at})
					if catalog.Legal(&g, next) == nil {
						room++
					}
				}
				free, ret := device.GetGpuInstanceRemainingCapacity(&nvml.GpuInstanceProfileInfo{Id: p.ID})
				if ret != nvml.SUCCESS || (free > 0) != (room > 0) || free > p.MaxInstances {
					t.Fatalf("%s with %v: the library has room for %d of %s (%v), the catalogue for %d",
						g.Board, layouts[l], free, p.Name, ret, room)
				}
			}
		}
	}
}

// put makes a layout the instances of a GPU.
func put(t *testing.T, f *state.File, gpu int, layout catalog.Layout) {
	t.Helper()
	err := f.Update(func(m *machine.Machine) error {
		mig := m.GPUs[gpu].MIG
		mig.Current, mig.Pending, mig.Instances = true, true, nil
		for id, in := range layout {
			mig.Instances = append(mig.Instances, machine.GPUInstance{ID: id, ProfileID: in.ProfileID, Placement: in.Placement})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
