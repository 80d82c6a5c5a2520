// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// session is what CUDA does for a program: an *mps.Client, or direct.
type session interface {
	Context(device int) error
	NewContext(device int) error
	Alloc(device int, bytes uint64) error
	// Launch starts a kernel that keeps some percent of what the program may use busy, until
	// it ends. With MPS this is all that it may use.
	Launch(device, percent int) error
	Synchronize(device int) error
	MemoryInfo(device int) (free, total uint64, err error)
	Fault(device int) error
	Ended() <-chan struct{}
	Failure() error
	Close()
}

// program is a process that has initialised CUDA.
type program struct {
	session
	devices []cuda.Device
	limits  []mps.Limits
	how     func(device int) string
}

// initialize is cuInit: it connects to MPS, or goes on without, in silence.
func initialize(ctx context.Context, shared string) (*program, error) {
	at, err := state.Find()
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", cuda.NoDevice, err)
	}
	f, err := state.Open(at.State)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", cuda.NoDevice, err)
	}
	if err := f.OpenDriver(); err != nil {
		return nil, err
	}
	m, err := f.Snapshot()
	if err != nil {
		return nil, err
	}
	here := cuda.Here(m, at.Root)
	pipe := mps.PipeDirectory()
	client, err := mps.Connect(ctx, mps.ClientOptions{
		Pipe: pipe, Shared: shared, Here: here, Root: at.Root,
		Visible: variable(mps.VisibleVariable), Percentage: variable(mps.PercentageVariable), Memory: variable(mps.MemoryVariable),
		Priority: variable(mps.PriorityVariable),
	})
	switch {
	case errors.Is(err, mps.ErrNoDaemon):
		return alone(f, m, at.Root, here, pipe)
	case err != nil:
		return nil, err
	}
	if err := cuda.FabricJoined(m, client.Devices); err != nil {
		client.Close()
		return nil, err
	}
	f.Close() // the server does the accounts
	return &program{
		session: throughMPS{client}, devices: client.Devices, limits: client.Limits,
		how: func(int) string { return client.How() },
	}, nil
}

// throughMPS is a client of an MPS server.
type throughMPS struct{ *mps.Client }

func (c throughMPS) Launch(device, _ int) error { return c.Client.Launch(device) }

func variable(name string) *string {
	if value, ok := os.LookupEnv(name); ok {
		return &value
	}
	return nil
}

// alone is a program without MPS.
func alone(f *state.File, m *machine.Machine, root string, here []cuda.Device, pipe string) (*program, error) {
	devices := cuda.Enumerate(here)
	if list := variable(mps.VisibleVariable); list != nil {
		devices = cuda.Select(here, *list)
	}
	if len(devices) == 0 {
		return nil, cuda.NoDevice
	}
	if err := cuda.FabricJoined(m, devices); err != nil {
		return nil, err
	}
	limits := make([]mps.Limits, len(devices))
	for i, d := range devices {
		limits[i] = mps.Limits{UUID: d.UUID, Percentage: 100}
	}
	nodes, err := cuda.Open(root, devices...)
	if err != nil {
		return nil, fmt.Errorf("%w (%w)", cuda.NoDevice, err)
	}
	d := &direct{
		state: f, devices: devices, nodes: nodes, memory: make([]uint64, len(devices)), contexts: make([]int, len(devices)),
		busy:     make([]int, len(devices)),
		holdings: make([]*state.Holding, len(devices)),
	}
	// A program that may not write the state, as in a container, holds what it has by
	// state.File.Hold.
	if d.owner, err = f.Own(); err != nil && !errors.Is(err, state.ErrReadOnly) {
		return nil, err
	}
	return &program{session: d, devices: devices, limits: limits, how: func(n int) string {
		if devices[n].Mode == cuda.ModeExclusiveProcess {
			return "alone, the device is for one process (EXCLUSIVE_PROCESS)"
		}
		return "OUTSIDE OF MPS, nothing limits it (no control daemon at " + pipe + ")"
	}}, nil
}

// direct is CUDA without MPS.
type direct struct {
	state   *state.File
	owner   uint64 // 0: the state is read-only
	devices []cuda.Device
	// contexts counts the program's, and memory has what it allocated beside them.
	contexts []int
	memory   []uint64
	busy     []int      // percentages of the devices' multiprocessors
	nodes    cuda.Nodes // until the program ends
	// holdings are those of devices with a context where the state is read-only.
	holdings []*state.Holding
}

func (d *direct) Context(n int) error {
	if d.contexts[n] > 0 {
		return nil
	}
	return d.NewContext(n)
}

func (d *direct) NewContext(n int) error {
	if err := d.within(n, d.devices[n].ContextMemory); err != nil {
		return err
	}
	return d.change(func(m *machine.Machine) error {
		// The mode and the processes of now, not of the program's start.
		if err := d.now(m, n).Free(m); err != nil && d.contexts[n] == 0 {
			return err
		}
		if d.used(m, n)+d.devices[n].ContextMemory > d.devices[n].Memory {
			return cuda.OutOfMemory
		}
		d.contexts[n]++
		return nil
	})
}

// within fails if the driver's limit does not leave the program so much more of a device.
func (d *direct) within(n int, bytes uint64) error {
	left, err := d.state.MemoryLeft(d.devices[n].GPU, os.Getpid())
	if err == nil && bytes > left {
		err = cuda.OutOfMemory
	}
	return err
}

// used is all that is used of a device, by this program and others.
func (d *direct) used(m *machine.Machine, n int) uint64 {
	return d.devices[n].Used(m)
}

// taken is what this program has of a device.
func (d *direct) taken(n int) uint64 {
	return d.memory[n] + uint64(d.contexts[n])*d.devices[n].ContextMemory
}

// now is the device with its present compute mode.
func (d *direct) now(m *machine.Machine, n int) cuda.Device {
	dev := d.devices[n]
	g := &m.GPUs[dev.GPU]
	if dev.Instance < 0 {
		dev.Mode = g.ComputeMode
		return dev
	}
	for _, in := range g.MIG.Instances {
		for _, ci := range in.Compute {
			if in.ID == dev.Instance && ci.ID == dev.Compute {
				dev.Mode = ci.ComputeMode
			}
		}
	}
	return dev
}

func (d *direct) Alloc(n int, bytes uint64) error {
	if err := d.within(n, bytes); err != nil {
		return err
	}
	return d.change(func(m *machine.Machine) error {
		if d.used(m, n)+bytes > d.devices[n].Memory {
			return cuda.OutOfMemory
		}
		d.memory[n] += bytes
		return nil
	})
}

// change does something that depends on the machine, and writes the program's
// entries where that is possible.
func (d *direct) change(do func(*machine.Machine) error) error {
	if d.owner == 0 {
		return d.changeReadOnly(do)
	}
	return d.state.Update(func(m *machine.Machine) error {
		if err := do(m); err != nil {
			return err
		}
		m.Processes = slices.DeleteFunc(m.Processes, func(p machine.Process) bool { return p.Owner == d.owner })
		for i := range d.devices {
			if d.contexts[i] > 0 {
				p := d.entry(i)
				p.PID, p.Name, p.Owner = os.Getpid(), filepath.Base(os.Args[0]), d.owner
				m.Processes = append(m.Processes, p)
			}
		}
		return nil
	})
}

// entry is what the program holds of a device.
func (d *direct) entry(n int) machine.Process {
	dev := d.devices[n]
	return machine.Process{GPU: dev.GPU, InstanceID: dev.Instance, ComputeID: dev.Compute, MemoryBytes: d.taken(n), SM: d.busy[n]}
}

// changeReadOnly is change without a lock: of two programs that do something at the
// same time, both may succeed.
func (d *direct) changeReadOnly(do func(*machine.Machine) error) error {
	m, err := d.state.Snapshot()
	if err != nil {
		return err
	}
	if err := do(m); err != nil {
		return err
	}
	for n := range d.devices {
		switch {
		case d.contexts[n] == 0:
		case d.holdings[n] == nil:
			d.holdings[n], err = d.state.Hold(d.entry(n))
		default:
			err = d.holdings[n].Change(d.entry(n))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// MemoryInfo is cuMemGetInfo.
func (d *direct) MemoryInfo(n int) (free, total uint64, err error) {
	m, err := d.state.Snapshot()
	if err != nil {
		return 0, 0, err
	}
	total = d.devices[n].Memory
	left, err := d.state.MemoryLeft(d.devices[n].GPU, os.Getpid())
	return min(left, total-min(total, d.used(m, n))), total, err
}

// Launch only shows as utilisation.
func (d *direct) Launch(n, percent int) error {
	return d.change(func(*machine.Machine) error {
		d.busy[n] = percent
		return nil
	})
}

// Synchronize waits for nothing.
func (d *direct) Synchronize(int) error { return nil }

// Fault is fatal for the program itself only.
func (d *direct) Fault(int) error { return cuda.LaunchFailed }

// Ended is never closed.
func (d *direct) Ended() <-chan struct{} { return nil }

// Failure is not called, because Ended is never closed.
func (d *direct) Failure() error { return nil }

func (d *direct) Close() {
	_ = d.nodes.Close()
	d.state.Close()
}
