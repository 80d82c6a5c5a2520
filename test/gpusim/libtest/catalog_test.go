// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestCatalogRules holds the library against the catalogue's own statement of
// what fits on a board: from a sample of all layouts, every profile at every
// placement, and of more of them, what there is room for.
func TestCatalogRules(t *testing.T) {
	const looked, tried = 150, 12 // layouts of each board
	for _, name := range catalog.Boards() {
		b := must.Get(catalog.Load(name))(t)
		g := must.Get(b.GPU())(t)
		if g.MIG == nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			g.UUID, g.PCIAddress = "GPU-"+name, "0000:1b:00.0"
			g.MIG.Current, g.MIG.Pending = true, true
			r := newRoot(t, machineOf(*g))
			d := device(t, r.open(), 0)
			layouts := catalog.Layouts(g)
			for i, layout := range layouts {
				look, try := i%(1+len(layouts)/looked) == 0, i%max(1, len(layouts)/tried) == 0
				if look || try {
					instances := populate(t, g, layout)
					r.update(func(m *machine.Machine) { m.GPUs[0].MIG.Instances = instances })
					checkRoom(t, d, g, layout)
				}
				if try {
					tryAll(t, d, g, layout)
				}
			}
		})
	}
}

// populate makes instances of a layout, with ids as the driver gives them.
func populate(t *testing.T, g *machine.GPU, layout catalog.Layout) []machine.GPUInstance {
	t.Helper()
	var out []machine.GPUInstance
	taken := map[int]bool{}
	for _, in := range layout {
		for _, p := range g.MIG.Profiles {
			if p.ID != in.ProfileID {
				continue
			}
			i := 0
			for i < len(p.InstanceIDs) && taken[p.InstanceIDs[i]] {
				i++
			}
			if i == len(p.InstanceIDs) {
				t.Fatalf("%s: no instance id is left for %v", p.Name, layout)
			}
			taken[p.InstanceIDs[i]] = true
			out = append(out, machine.GPUInstance{ID: p.InstanceIDs[i], ProfileID: p.ID, Placement: in.Placement})
		}
	}
	return out
}

// checkRoom asks the library which profiles there is room for beside a layout.
func checkRoom(t *testing.T, d nvml.Device, g *machine.GPU, layout catalog.Layout) {
	t.Helper()
	for _, p := range g.MIG.Profiles {
		room := slices.ContainsFunc(p.Placements, func(at machine.Placement) bool {
			return catalog.Legal(g, append(slices.Clip(layout), catalog.Instance{ProfileID: p.ID, Placement: at})) == nil
		})
		free := get(d.GetGpuInstanceRemainingCapacity(&nvml.GpuInstanceProfileInfo{Id: p.ID}))(t, "GetGpuInstanceRemainingCapacity")
		if free > 0 != room || free > p.MaxInstances {
			t.Fatalf("beside %v, the library has room for %d of %s, the catalogue: %t", layout, free, p.Name, room)
		}
	}
}

// tryAll creates every possible instance beside a layout, one at a time.
func tryAll(t *testing.T, d nvml.Device, g *machine.GPU, layout catalog.Layout) {
	t.Helper()
	for _, p := range g.MIG.Profiles {
		info := get(d.GetGpuInstanceProfileInfo(p.Enum))(t, "GetGpuInstanceProfileInfo")
		for _, at := range p.Placements {
			with := append(layout[:len(layout):len(layout)], catalog.Instance{ProfileID: p.ID, Placement: at})
			legal := catalog.Legal(g, with)
			gi, ret := d.CreateGpuInstanceWithPlacement(&info, place(uint32(at.Start), uint32(at.Size)))
			switch {
			case legal == nil && ret == nvml.SUCCESS:
				wants(t, "Destroy", gi.Destroy(), nvml.SUCCESS)
			case legal == nil || ret != nvml.ERROR_INSUFFICIENT_RESOURCES:
				t.Fatalf("beside %v, %s at %v: the library says %v, the catalogue %v", layout, p.Name, at, ret, legal)
			}
		}
	}
}
