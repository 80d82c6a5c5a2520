// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cgroup"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// limiting is a client of a machine whose driver limits memory, or not, and the cgroups that it sees, if any.
func limiting(t *testing.T, driver string, withCgroups bool) (c *Client, file *state.File, tree string) {
	t.Helper()
	m := newMachine(t, "t4x1")
	m.DriverVersion = driver
	c, file = simulateClosed(t, m, Options{})
	tree = filepath.Join(c.roots.Sys, "fs/cgroup")
	if withCgroups {
		cgroup.MountAt(t, tree)
	}
	fatal.Do(t, c.Open(t.Context()))
	return c, file, tree
}

func TestSimulatedMemoryLimits(t *testing.T) {
	for name, test := range map[string]struct {
		driver  string
		cgroups bool
		want    bool
	}{
		"driver 615":                 {"615.71.09", true, true},
		"driver 610":                 {"610.10.01", true, false},
		"driver 615, and no cgroups": {"615.71.09", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			c, file, _ := limiting(t, test.driver, test.cgroups)
			for range 2 {
				node, err := c.Discover(t.Context())
				if err != nil || node.GPUs[0].MemoryLimits != test.want {
					t.Fatalf("%+v, %v", node, err)
				}
			}
			if n := calls(t, file)[getMemoryLimits]; test.cgroups && n != 1 || !test.cgroups && n != 0 {
				t.Errorf("asked %d times", n)
			}
		})
	}
}

// A driver in trouble is asked again: only what it says is kept.
func TestSimulatedMemoryLimitsLater(t *testing.T) {
	c, file, _ := limiting(t, "615.71.09", true)
	addFault(t, file, machine.Fault{Function: getMemoryLimits, Code: 999, Times: 1})
	for _, want := range []bool{false, true} {
		node, err := c.Discover(t.Context())
		if err != nil || len(node.GPUs) != 1 || node.GPUs[0].MemoryLimits != want {
			t.Fatalf("%+v, %v, want %t", node, err, want)
		}
	}
}

func TestSimulatedLimitMemory(t *testing.T) {
	c, file, tree := limiting(t, "615.71.09", true)
	g := snapshot(t, file).GPUs[0]
	pod := cgroup.Make(t, tree, "pod")
	limit := func() error { return c.LimitMemory(t.Context(), g.PCIAddress, g.UUID, pod, 512*mib, 1024*mib) }
	fatal.Do(t, limit())
	if err := c.LimitMemory(t.Context(), g.PCIAddress, "GPU-another", pod, mib, mib); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("of another GPU: %v", err)
	}
	expect.Says(t, c.LimitMemory(t.Context(), g.PCIAddress, g.UUID, pod+"-none", mib, mib), pod+"-none", "of no cgroup")
	for name, fault := range map[string]machine.Fault{
		"a driver that does nothing and says so": {Function: setMemoryLimits, Code: 3},
		"a driver that only says that it does":   {Function: setMemoryLimits, Effect: machine.Pretend},
		"a driver that does not say what it did": {Function: getMemoryLimits, Code: 999},
	} {
		t.Run(name, func(t *testing.T) {
			fault.ID = 1
			other := cgroup.Make(t, tree, fmt.Sprintf("code %d, effect %d", fault.Code, fault.Effect))
			update(t, file, func(m *machine.Machine) { m.Faults = []machine.Fault{fault} })
			defer update(t, file, func(m *machine.Machine) { m.Faults = nil })
			expect.Fails(t, c.LimitMemory(t.Context(), g.PCIAddress, g.UUID, other, mib, mib))
			if fault.Effect == machine.Pretend {
				// Earlier limits are no less wrong than none.
				expect.Says(t, c.LimitMemory(t.Context(), g.PCIAddress, g.UUID, pod, mib, 2*mib), "536870912 and 1073741824 bytes instead")
			}
		})
	}
	expect.Do(t, limit(), "again")
}
