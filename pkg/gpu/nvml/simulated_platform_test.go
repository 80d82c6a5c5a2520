// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	fatal "github.com/partage-dev/partage/test/must"
)

// discovered are the GPUs of a machine, none of which is broken.
func discovered(t *testing.T, m *machine.Machine) []gpu.GPU {
	t.Helper()
	c, _ := simulate(t, m)
	node, err := c.Discover(t.Context())
	if err != nil || len(node.Broken) > 0 || len(node.GPUs) != len(m.GPUs) {
		t.Fatalf("%+v, %v", node, err)
	}
	return node.GPUs
}

// TestSimulatedCoherentMemory: who manages the memory of coherent GPUs is read for these alone, as
// the parameter may be set anywhere.
func TestSimulatedCoherentMemory(t *testing.T) {
	for name, test := range map[string]struct {
		machine, driver string
		mode            machine.CoherentMemory
		want            gpu.CoherentMemory
	}{
		"by default":               {machine: "gh200-144x1"},
		"numa":                     {machine: "gh200-144x1", driver: "615.71.09", mode: machine.CoherentNUMA},
		"driver":                   {machine: "gh200-144x1", mode: machine.CoherentDriver, want: gpu.CoherentDriver},
		"by default from R615 on":  {machine: "gb200x1", driver: "615.71.09", want: gpu.CoherentDriver},
		"not coherent":             {machine: "h100-80-sxmx1", mode: machine.CoherentDriver},
		"not coherent, by default": {machine: "h100-80-sxmx1", driver: "615.71.09"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, test.machine)
			m.CoherentMemory = test.mode
			if test.driver != "" {
				m.DriverVersion = test.driver
			}
			g := discovered(t, m)[0]
			if g.CoherentMemory != test.want || g.MIG == nil {
				t.Errorf("managed by %q, want %q, MIG %v", g.CoherentMemory, test.want, g.MIG)
			}
		})
	}
}

// TestSimulatedCoherentMemoryUnknown: where the driver's parameters cannot be read, or hang, nobody is
// taken to manage the memory until they are read. The GPU answers all the same, and what is known stays known.
func TestSimulatedCoherentMemoryUnknown(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"missing": func(string) error { return nil },
		"hanging": func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "gb200-node")
			m.CoherentMemory = machine.CoherentDriver
			c, _ := simulateClosed(t, m, Options{Calls: call.New(2 * time.Second)})
			fatal.Do(t, c.Open(t.Context()))
			path := filepath.Join(c.roots.Proc, "driver/nvidia/params")
			aside := path + ".aside"
			fatal.Do(t, errors.Join(os.Rename(path, aside), replace(path)))
			// Without the limit it would not return.
			wantCoherentMemory(t, c, len(m.GPUs), gpu.CoherentUnknown)
			if name == "hanging" {
				wantCoherentMemory(t, c, len(m.GPUs), gpu.CoherentUnknown) // nothing more gets stuck
				release(t, path)
				for hung := c.calls.Pending("read"); hung != nil; hung = c.calls.Pending("read") {
					<-hung.Done
				}
			}
			fatal.Do(t, os.Rename(aside, path))
			wantCoherentMemory(t, c, len(m.GPUs), gpu.CoherentDriver)
			fatal.Do(t, os.Remove(path))
			wantCoherentMemory(t, c, len(m.GPUs), gpu.CoherentDriver)
		})
	}
}

func wantCoherentMemory(t *testing.T, c *Client, gpus int, want gpu.CoherentMemory) {
	t.Helper()
	node, err := c.Discover(t.Context())
	if err != nil || len(node.GPUs) != gpus {
		t.Fatalf("%+v, %v", node, err)
	}
	for _, g := range node.GPUs {
		expect.Equal(t, g.CoherentMemory, want, "memory of GPU", g.PCIAddress, "is managed by")
	}
}

// release ends the reads of a pipe that nobody writes to.
func release(t *testing.T, pipe string) {
	t.Helper()
	fatal.Do(t, fatal.Get(os.OpenFile(pipe, os.O_WRONLY|unix.O_NONBLOCK, 0))(t).Close())
}

// TestSimulatedMIGModeOfDriverManagedMemory: such a GPU cannot be partitioned.
func TestSimulatedMIGModeOfDriverManagedMemory(t *testing.T) {
	m := newMachine(t, "gh200-144x1")
	m.CoherentMemory = machine.CoherentDriver
	c, _ := simulate(t, m)
	expect.Is(t, c.SetMIGMode(t.Context(), m.GPUs[0].PCIAddress, true), gpu.ErrNotSupported)
}

// TestSimulatedUnknownArchitecture: a generation or brand of GPUs that the library or this code has no name for
// is a GPU like others. Where NVML itself does not know it, MIG mode is left to the administrator.
func TestSimulatedUnknownArchitecture(t *testing.T) {
	for name, test := range map[string]struct {
		architecture int
		dynamic      bool
	}{
		"newer than this code": {nvml.DEVICE_ARCH_RUBIN + 1, true},
		"newer than NVML":      {-1, false}, // NVML_DEVICE_ARCH_UNKNOWN
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx2")
			m.GPUs[0].Architecture, m.GPUs[0].Brand = test.architecture, int(nvml.BRAND_COUNT)
			gpus := discovered(t, m)
			g, neighbour := gpus[0], gpus[1]
			if g.Architecture != "Unknown" || g.Brand != "Unknown" || g.MIG == nil || g.MIG.Dynamic != test.dynamic || len(g.MIG.Profiles) != len(neighbour.MIG.Profiles) {
				t.Errorf("%q, %+v", g.Architecture, g.MIG)
			}
			if neighbour.Architecture != "Hopper" || neighbour.Brand != "Nvidia" || !neighbour.MIG.Dynamic {
				t.Errorf("its neighbour: %q, %+v", neighbour.Architecture, neighbour.MIG)
			}
		})
	}
}

// TestSimulatedNoMemoryInfo: a GPU that has the host's memory reports none.
func TestSimulatedNoMemoryInfo(t *testing.T) {
	m := newMachine(t, "l4x2")
	m.GPUs[0].MemoryBytes, m.GPUs[0].ReservedBytes = 0, 0
	gpus := discovered(t, m)
	if g := gpus[0]; g.Resources.MemoryBytes != 0 || g.ReservedBytes != 0 || g.ProductName != gpus[1].ProductName {
		t.Errorf("%+v", g)
	}
	if gpus[1].Resources.MemoryBytes == 0 {
		t.Error("its neighbour has none either")
	}
}

// TestSimulatedFabricPending: a GPU with instances is out of its fabric, and how far it is counts
// for undivided GPUs only.
func TestSimulatedFabricPending(t *testing.T) {
	for name, test := range map[string]struct {
		state           int
		mig, instance   bool
		pending, health string
	}{
		"no fabric":      {state: nvml.GPU_FABRIC_STATE_NOT_SUPPORTED},
		"not started":    {state: nvml.GPU_FABRIC_STATE_NOT_STARTED, pending: "Not Started", health: "Not Started"},
		"in progress":    {state: nvml.GPU_FABRIC_STATE_IN_PROGRESS, pending: "In Progress", health: "In Progress"},
		"completed":      {state: nvml.GPU_FABRIC_STATE_COMPLETED},
		"MIG mode":       {state: nvml.GPU_FABRIC_STATE_IN_PROGRESS, mig: true, pending: "In Progress"},
		"with instances": {state: nvml.GPU_FABRIC_STATE_COMPLETED, mig: true, instance: true, pending: "Not Started"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx1")
			g := &m.GPUs[0]
			g.Health.Fabric.State = test.state
			g.MIG.Current, g.MIG.Pending = test.mig, test.mig
			if test.instance {
				g.MIG.Instances = []machine.GPUInstance{g.MIG.Profiles[0].Instance(0, "MIG-1")}
			}
			c, _ := simulate(t, m)
			expect.Equal(t, fatal.Get(c.FabricPending(t.Context(), g.PCIAddress))(t), test.pending)
			if health, err := c.Health(t.Context(), g.PCIAddress); err != nil || health.FabricPending != test.health {
				t.Errorf("health: %q, %v, want %q", health.FabricPending, err, test.health)
			}
		})
	}
}

// TestSimulatedRetiredPages: what GPUs do that do not remap rows.
func TestSimulatedRetiredPages(t *testing.T) {
	for board, want := range map[string]bool{"t4x1": true, "h100-80-sxmx1": false} {
		t.Run(board, func(t *testing.T) {
			m := newMachine(t, board)
			m.GPUs[0].Health.RetiredPagesPending = true
			c, file := simulate(t, m)
			health, err := c.Health(t.Context(), m.GPUs[0].PCIAddress)
			if err != nil || health.RepairPending != want {
				t.Errorf("%+v, %v", health, err)
			}
			expect.Len(t, fatal.Get(file.Unmodelled())(t), 0, "not simulated")
		})
	}
}
