// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func TestMachines(t *testing.T) {
	named := must.Get(Machines())(t)
	names := []string{"a30x4", "l4x8", "t4x4", "a10x1", "rtx-pro-6000x8", "a100x16", "h100-nvlx2", "gh200x1", "h100x16"}
	for _, m := range named {
		names = append(names, m.Name)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			m := must.Get(Machine(name, Options{}))(t)
			var addresses []string
			seen := map[any]bool{}
			for _, g := range m.GPUs {
				addresses = append(addresses, g.PCIAddress)
				for _, key := range []any{g.Minor, g.UUID, g.Serial} {
					if seen[key] {
						t.Errorf("%v occurs twice", key)
					}
					seen[key] = true
				}
				checkPlace(t, g)
			}
			if !slices.IsSorted(addresses) || len(slices.Compact(addresses)) != len(m.GPUs) {
				t.Errorf("addresses must ascend: %v", addresses)
			}
		})
	}
}

// TestTopology: what is near what has a place on the PCI bus, and NVLinks of GPUs go both ways.
func TestTopology(t *testing.T) {
	links := map[string]int{"dgx-a100": 12, "dgx-h100": 18, "dgx-h200": 18, "dgx-b200": 18, "gb200-node": 18, "h100-nvl-pairs": 12}
	for name, want := range links {
		m := must.Get(Machine(name, Options{}))(t)
		active := map[[2]string]int{}
		for _, g := range m.GPUs {
			up := 0
			for _, l := range g.NVLinks {
				if !l.Down {
					up++
					active[[2]string{g.PCIAddress, l.Remote}]++
				}
			}
			expect.Equal(t, up, want, name, g.PCIAddress, "active links")
		}
		for ends, n := range active {
			if isGPU(m, ends[1]) && active[[2]string{ends[1], ends[0]}] != n {
				t.Errorf("%s: %d links from %s to %s, which do not lead back", name, n, ends[0], ends[1])
			}
		}
		if len(m.NICs) == 0 {
			t.Errorf("%s has no network cards", name)
		}
		for _, n := range m.NICs {
			checkPlace(t, machine.GPU{PCIAddress: n.PCIAddress, PCIeRoot: n.PCIeRoot, NUMANode: n.NUMANode})
		}
	}
}

func isGPU(m *machine.Machine, address string) bool {
	return slices.ContainsFunc(m.GPUs, func(g machine.GPU) bool { return g.PCIAddress == address })
}

var (
	address = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
	root    = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
)

func checkPlace(t *testing.T, g machine.GPU) {
	t.Helper()
	if !address.MatchString(g.PCIAddress) || !root.MatchString(g.PCIeRoot) || g.NUMANode < 0 || g.Minor >= maxGPUs {
		t.Fatalf("address %s, root %s, NUMA node %d, minor %d", g.PCIAddress, g.PCIeRoot, g.NUMANode, g.Minor)
	}
	if g.PCIeRoot[3:7] != g.PCIAddress[:4] || g.PCIeRoot[8:] > g.PCIAddress[5:7] {
		t.Errorf("%s cannot be below %s", g.PCIAddress, g.PCIeRoot)
	}
}

func TestMachineIdentity(t *testing.T) {
	get := func(name string, o Options) any {
		return must.Get(Machine(name, o))(t)
	}
	expect.Same(t, get("dgx-h100", Options{Seed: 7}), get("dgx-h100", Options{Seed: 7}), "same seed, different machine")
	if cmp.Equal(get("dgx-h100", Options{}), get("dgx-h100", Options{Seed: 7})) {
		t.Error("the seed changes nothing")
	}
	m := must.Get(Machine("dgx-h100", Options{}))(t)
	got := []any{m.DriverVersion, m.NVMLVersion, m.CUDADriverVersion, len(m.GPUs), m.GPUs[0].ProductName, m.GPUs[0].PCIDeviceID}
	expect.Same(t, got, []any{"580.95.05", "13.580.95.05", 13000, 8, "NVIDIA H100 80GB HBM3", uint32(0x233010de)})
	if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(m.BootID) {
		t.Errorf("boot id %q", m.BootID)
	}
	if NewBootID(m.BootID) == m.BootID {
		t.Error("the boot id does not change")
	}
}

func TestMachineRefuses(t *testing.T) {
	for name, want := range map[string]string{
		"cray":     "dgx-h100",
		"voodoox2": "unknown board",
		"l4x0":     "1 to 16",
		"l4x17":    "1 to 16",
		"":         "known",
	} {
		expect.Says(t, expect.Err(Machine(name, Options{})), want, name)
	}
}
