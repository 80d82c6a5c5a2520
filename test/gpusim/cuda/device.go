// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cuda is the part of a CUDA driver that decides which devices a program
// sees, and that has names for what goes wrong. It knows simulated machines only.
package cuda

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// Device is what CUDA numbers from 0: a GPU, or a compute instance of one.
type Device struct {
	UUID string // "GPU-…" or "MIG-…"
	Name string
	// GPU, Instance and Compute say what it is on the machine; the latter two are
	// -1 for a GPU.
	GPU, Instance, Compute int
	// Minor is the GPU's number among device nodes.
	Minor int
	// Memory is what programs can use of it, in bytes.
	Memory uint64
	// ContextMemory is what a context takes of that, and ServerMemory what an MPS
	// server does.
	ContextMemory, ServerMemory uint64
	// Multiprocessors of it, and of the whole GPU.
	Multiprocessors, OfGPU int
	// Major is that of the compute capability.
	Major int
	// Mode is its compute mode, an nvmlComputeMode_t.
	Mode int
}

// The compute modes that are left, nvmlComputeMode_t.
const (
	ModeDefault          = 0
	ModeProhibited       = 2
	ModeExclusiveProcess = 3
)

// Holds reports whether the process has a context on this device.
func (d Device) Holds(p machine.Process) bool {
	return p.Kind != machine.Handle && p.GPU == d.GPU && p.InstanceID == d.Instance && p.ComputeID == d.Compute
}

// Free fails unless one more process may make a context on the device.
func (d Device) Free(m *machine.Machine) error {
	switch d.Mode {
	case ModeProhibited:
		return DeviceUnavailable
	case ModeExclusiveProcess:
		if slices.ContainsFunc(m.Processes, d.Holds) {
			return DeviceUnavailable
		}
	}
	return nil
}

// Used is how much of the device's memory is in use. The compute instances of
// a GPU instance share its memory.
func (d Device) Used(m *machine.Machine) uint64 {
	var sum uint64
	for _, p := range m.Processes {
		if p.GPU == d.GPU && p.InstanceID == d.Instance {
			sum += p.MemoryBytes
		}
	}
	return sum
}

// Here are the devices of a machine whose nodes are below root, as on a host or
// in a container: GPUs in their order, each followed by its compute instances. A
// GPU in MIG mode is none itself. Those that have failed are left out.
func Here(m *machine.Machine, root string) []Device {
	// Without unified memory CUDA does not initialise; with which error is assumed.
	if !present(root, "nvidiactl") || !present(root, "nvidia-uvm") {
		return nil
	}
	all := present(root, "nvidia-caps/nvidia-cap1") // who may configure MIG sees everything
	var out []Device
	for i := range m.GPUs {
		g := &m.GPUs[i]
		switch {
		case g.Failure != 0 || !present(root, fmt.Sprintf("nvidia%d", g.Minor)):
		case g.MIG == nil || !g.MIG.Current:
			out = append(out, whole(i, g))
		default:
			out = append(out, instances(i, g, func(gi, ci int) bool {
				minor := capability(g.Minor, gi)
				return all || present(root, fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor)) &&
					present(root, fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor+1+ci))
			})...)
		}
	}
	return out
}

// FabricJoined fails as long as one of the devices is an undivided GPU that waits for its NVLink
// fabric.
func FabricJoined(m *machine.Machine, devices []Device) error {
	const notStarted, inProgress = 1, 2 // nvmlGpuFabricState_t
	for _, d := range devices {
		if state := m.GPUs[d.GPU].Health.Fabric.State; d.Instance < 0 && (state == notStarted || state == inProgress) {
			return SystemNotReady
		}
	}
	return nil
}

// capability is the minor of the node for a GPU instance.
func capability(gpuMinor, gi int) int { return 3 + 135*gpuMinor + 9*gi }

func present(root, node string) bool { return state.IsCharDevice(filepath.Join(root, "dev", node)) }

// coresPerSM by compute capability (CUDA C++ programming guide, "Arithmetic
// Instructions").
func coresPerSM(major, minor int) int {
	if major < 8 || major == 8 && minor == 0 {
		return 64
	}
	return 128
}

func whole(index int, g *machine.GPU) Device {
	sms := g.Cores / coresPerSM(g.ComputeMajor, g.ComputeMinor)
	return Device{
		UUID: g.UUID, Name: g.ProductName, GPU: index, Instance: -1, Compute: -1, Minor: g.Minor, Memory: g.MemoryBytes - g.ReservedBytes,
		ContextMemory: g.ContextBytes, ServerMemory: g.MPSServerBytes,
		Multiprocessors: sms, OfGPU: sms, Major: g.ComputeMajor, Mode: g.ComputeMode,
	}
}

func instances(index int, g *machine.GPU, visible func(gi, ci int) bool) []Device {
	var out []Device
	for _, in := range g.MIG.Instances {
		p := slices.IndexFunc(g.MIG.Profiles, func(p machine.GIProfile) bool { return p.ID == in.ProfileID })
		if p < 0 {
			continue
		}
		for _, ci := range in.Compute {
			if visible(in.ID, ci.ID) {
				out = append(out, compute(index, g, &g.MIG.Profiles[p], in.ID, ci))
			}
		}
	}
	return out
}

func compute(index int, g *machine.GPU, p *machine.GIProfile, gi int, ci machine.ComputeInstance) Device {
	d := whole(index, g)
	d.UUID, d.Instance, d.Compute, d.Memory, d.Mode = ci.UUID, gi, ci.ID, (p.MemoryMiB-p.ReservedMiB)<<20, ci.ComputeMode
	d.ContextMemory = g.MIG.ContextBytes
	d.Name += " MIG "
	if ci.Placement.Size < p.Slices {
		d.Name += fmt.Sprintf("%dc.", ci.Placement.Size)
	}
	d.Name += p.Name
	d.Multiprocessors = p.SMs
	for _, c := range p.Compute {
		if c.ID == ci.ProfileID {
			d.Multiprocessors = c.SMs
		}
	}
	return d
}

// perTPC is how many multiprocessors a texture processing cluster has, from Volta on.
// Percentages are rounded to whole ones: 25 % of 188 multiprocessors were 46.
const perTPC = 2

// fewest is how many multiprocessors a client has at least: 8 of an H100.
func (d Device) fewest() int {
	switch {
	case d.Major >= 9:
		return 8
	case d.Major == 8:
		return 4
	}
	return perTPC
}

// Limited is how many multiprocessors a client of MPS has that may use a percentage of
// the device's, which is rounded down to what the hardware can do.
func (d Device) Limited(percentage float64) int {
	n := int(float64(d.Multiprocessors) * percentage / 100)
	if n >= d.Multiprocessors {
		return d.Multiprocessors
	}
	return min(d.Multiprocessors, max(d.fewest(), n/perTPC*perTPC))
}

// Select are the devices that a program gets whose CUDA_VISIBLE_DEVICES is list;
// one that has not set it gets Enumerate(here).
//
// An entry is an ordinal among the GPUs, a UUID or the beginning of one. The first
// that means nothing ends the list (CUDA C++ programming guide).
func Select(here []Device, list string) []Device {
	var chosen []Device
	for entry := range strings.SplitSeq(list, ",") {
		d, ok := find(here, strings.TrimSpace(entry))
		if !ok || slices.Contains(chosen, d) {
			break
		}
		chosen = append(chosen, d)
	}
	return Enumerate(chosen)
}

// Enumerate applies CUDA's rules for MIG: where any compute instance is visible,
// the first one is the only device.
func Enumerate(visible []Device) []Device {
	if i := slices.IndexFunc(visible, func(d Device) bool { return d.Compute >= 0 }); i >= 0 {
		return visible[i : i+1]
	}
	return visible
}

// leastPrefix is how much of a UUID is enough to be one.
const leastPrefix = len("GPU-x")

func find(here []Device, entry string) (Device, bool) {
	if n, err := strconv.Atoi(entry); err == nil {
		return ordinal(here, n)
	}
	if len(entry) < leastPrefix {
		return Device{}, false
	}
	i := slices.IndexFunc(here, func(d Device) bool { return strings.HasPrefix(d.UUID, entry) })
	if i < 0 {
		return Device{}, false
	}
	return here[i], true
}

// ordinal is the nth GPU, or the first compute instance of it.
func ordinal(here []Device, n int) (Device, bool) {
	gpus := slices.CompactFunc(slices.Clone(here), func(a, b Device) bool { return a.GPU == b.GPU })
	if n < 0 || n >= len(gpus) {
		return Device{}, false
	}
	return gpus[n], true
}
