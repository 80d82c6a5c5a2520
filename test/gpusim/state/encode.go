// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"fmt"
	"math"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// encoder fills C structures and keeps the first thing that does not fit.
type encoder struct {
	err    error
	before *C.struct_gs_machine // for serials; nil for a new machine
	serial C.uint64_t
}

// encode writes m into c, which must be zero. Instances that were in before
// keep their serials, so that handles to them stay good.
func encode(c *C.struct_gs_machine, m *machine.Machine, before *C.struct_gs_machine) error {
	e := &encoder{before: before, serial: 1}
	if before != nil {
		e.serial = before.next_serial
		if C.GoString(&before.boot_id[0]) != m.BootID {
			e.before = nil // a reboot: nothing survives
		}
	}
	e.text(c.name[:], "machine name", m.Name)
	e.text(c.driver_version[:], "driver version", m.DriverVersion)
	e.text(c.nvml_version[:], "NVML version", m.NVMLVersion)
	e.text(c.boot_id[:], "boot id", m.BootID)
	c.moving_minors = flag(m.MovingMinors)
	c.coherent_memory = e.number("mode of coherent memory", int(m.CoherentMemory))
	c.cuda_driver_version = e.number("CUDA driver version", m.CUDADriverVersion)
	if e.fits("GPUs", len(m.GPUs), C.GS_MAX_GPUS) {
		c.gpu_count = C.int32_t(len(m.GPUs))
		for i := range m.GPUs {
			e.gpu(&c.gpus[i], i, &m.GPUs[i])
			if m.GPUs[i].Failure != 0 {
				c.failing++
			}
		}
	}
	e.nics(c, m.NICs)
	if e.fits("processes", len(m.Processes), C.GS_MAX_PROCESSES) {
		c.process_count = C.int32_t(len(m.Processes))
		for i := range m.Processes {
			e.process(&c.processes[i], &m.Processes[i], len(m.GPUs))
		}
	}
	e.faults(c, before, m)
	e.events(c, before, m)
	e.latencies(c, m)
	c.mps_harmless_kills = flag(m.MPS.HarmlessKills)
	c.mps_named_shared_memory = flag(m.MPS.NamedSharedMemory)
	c.mps_few_files = flag(m.MPS.FewFiles)
	c.mps_no_priorities = flag(m.MPS.NoPriorities)
	c.mps_control_needs_shared_memory = flag(m.MPS.ControlNeedsSharedMemory)
	c.next_serial = e.serial
	if e.before != nil {
		c.memory_limits = before.memory_limits
	}
	return e.err
}

func (e *encoder) fail(format string, args ...any) {
	if e.err == nil {
		e.err = fmt.Errorf(format, args...)
	}
}

func (e *encoder) fits(what string, n, limit int) bool {
	if n > limit {
		e.fail("%d %s, at most %d fit", n, what, limit)
	}
	return n <= limit
}

func (e *encoder) text(dst []C.char, what, s string) {
	if !e.fits("bytes of "+what, len(s), len(dst)-1) {
		return
	}
	for i := range len(s) {
		dst[i] = C.char(s[i])
	}
}

func (e *encoder) number(what string, n int) C.int32_t {
	if n < math.MinInt32 || n > math.MaxInt32 {
		e.fail("%s %d does not fit 32 bits", what, n)
	}
	return C.int32_t(n)
}

func (e *encoder) process(c *C.struct_gs_process, p *machine.Process, gpus int) {
	if p.GPU < 0 || p.GPU >= gpus {
		e.fail("process %d holds GPU %d of %d", p.PID, p.GPU, gpus)
	}
	e.text(c.name[:], "process name", p.Name)
	c.pid = e.number("process id", p.PID)
	c.gpu = e.number("GPU index", p.GPU)
	c.instance_id = e.number("GPU instance id", p.InstanceID)
	c.compute_id = e.number("compute instance id", p.ComputeID)
	c.memory_bytes = C.uint64_t(p.MemoryBytes)
	if p.SM < 0 || p.SM > 100 {
		e.fail("process %d keeps %d %% of the multiprocessors busy: it is 0 to 100", p.PID, p.SM)
	}
	c.sm = C.int32_t(p.SM)
	c.owner = C.uint64_t(p.Owner)
	if p.Kind < 0 || p.Kind >= C.GS_KINDS {
		e.fail("process %d is of the unknown kind %d", p.PID, p.Kind)
	}
	c.kind = C.int32_t(p.Kind)
	e.text(c.pipe[:], "MPS folder", p.Pipe)
	if p.Status < machine.MPSInitializing || p.Status > machine.MPSFault {
		e.fail("process %d has the unknown MPS status %d", p.PID, int(p.Status))
	}
	c.status = C.int32_t(p.Status)
	c.fault = flag(p.Fault)
}

func (e *encoder) gpu(c *C.struct_gs_gpu, index int, g *machine.GPU) {
	e.text(c.board[:], "board", g.Board)
	e.text(c.uuid[:], "UUID", g.UUID)
	e.text(c.serial[:], "serial", g.Serial)
	e.text(c.product_name[:], "product name", g.ProductName)
	e.text(c.pci_address[:], "PCI address", g.PCIAddress)
	e.place(c, g)
	c.brand = e.number("brand", g.Brand)
	c.architecture = e.number("architecture", g.Architecture)
	c.compute_major = e.number("compute capability", g.ComputeMajor)
	c.compute_minor = e.number("compute capability", g.ComputeMinor)
	c.minor = e.number("minor", g.Minor)
	c.pci_device_id = C.uint32_t(g.PCIDeviceID)
	c.pci_subsystem = C.uint32_t(g.PCISubsystem)
	c.numa_node = e.number("NUMA node", g.NUMANode)
	c.memory_bytes = C.uint64_t(g.MemoryBytes)
	c.reserved_bytes = C.uint64_t(g.ReservedBytes)
	c.context_bytes = C.uint64_t(g.ContextBytes)
	c.mps_server_bytes = C.uint64_t(g.MPSServerBytes)
	c.cores = e.number("cores", g.Cores)
	c.addressing_mode = e.number("addressing mode", g.AddressingMode)
	c.ecc = e.number("ECC", g.ECC)
	c.compute_mode = e.number("compute mode", g.ComputeMode)
	c.time_slice = e.number("time slice", g.TimeSlice)
	c.persistence = flag(g.Persistence)
	c.failure = e.number("failure", g.Failure)
	c.no_events = flag(g.NoEvents)
	c.resets = e.natural("resets", g.Resets)
	e.health(&c.health, &g.Health)
	c.meters = C.struct_gs_meters{
		milliwatts: e.natural("power", g.Meters.PowerMilliwatts), nvlink_tx_kib: C.uint64_t(g.Meters.NVLinkTx), nvlink_rx_kib: C.uint64_t(g.Meters.NVLinkRx),
		pcie_tx_kb: e.number("PCIe throughput", g.Meters.PCIeTx), pcie_rx_kb: e.number("PCIe throughput", g.Meters.PCIeRx),
	}
	if g.MIG != nil {
		e.mig(c, index, g.MIG)
	}
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

func (e *encoder) mig(c *C.struct_gs_gpu, index int, m *machine.MIG) {
	c.mig_capable = 1
	c.mig_current = flag(m.Current)
	c.mig_pending = flag(m.Pending)
	c.reset_to_switch = flag(m.ResetToSwitch)
	c.memory_slices = e.number("memory slices", m.MemorySlices)
	c.mig_context_bytes = C.uint64_t(m.ContextBytes)
	if e.fits("GPU instance profiles", len(m.Profiles), C.GS_MAX_PROFILES) {
		c.profile_count = C.int32_t(len(m.Profiles))
		for i := range m.Profiles {
			e.profile(&c.profiles[i], &m.Profiles[i])
		}
	}
	if e.fits("GPU instances", len(m.Instances), C.GS_MAX_INSTANCES) {
		c.instance_count = C.int32_t(len(m.Instances))
		for i := range m.Instances {
			e.instance(&c.instances[i], index, &m.Instances[i])
		}
	}
}

func (e *encoder) profile(c *C.struct_gs_profile, p *machine.GIProfile) {
	e.text(c.name[:], "profile name", p.Name)
	c.enumeration = e.number("profile constant", p.Enum)
	c.id = C.uint32_t(p.ID)
	c.slices = e.number("slices", p.Slices)
	c.max_instances = e.number("instances", p.MaxInstances)
	c.sms = e.number("multiprocessors", p.SMs)
	c.copy_engines = e.number("copy engines", p.CopyEngines)
	c.decoders = e.number("decoders", p.Decoders)
	c.encoders = e.number("encoders", p.Encoders)
	c.jpeg = e.number("JPEG engines", p.JPEG)
	c.ofa = e.number("OFAs", p.OFA)
	c.memory_mib = C.uint64_t(p.MemoryMiB)
	c.reserved_mib = e.number("reserved memory", int(p.ReservedMiB)) // #nosec G115 -- number checks it
	if e.fits("placements of profile "+p.Name, len(p.Placements), C.GS_MAX_PLACEMENTS) {
		c.placement_count = C.int32_t(len(p.Placements))
		for i, at := range p.Placements {
			c.placements[i] = e.placement(at)
		}
	}
	if e.fits("instance ids of profile "+p.Name, len(p.InstanceIDs), C.GS_MAX_INSTANCE_IDS) {
		c.instance_id_count = C.int32_t(len(p.InstanceIDs))
		for i, id := range p.InstanceIDs {
			c.instance_ids[i] = e.number("GPU instance id", id)
		}
	}
	if e.fits("compute profiles of profile "+p.Name, len(p.Compute), C.GS_MAX_CI_PROFILES) {
		c.ci_profile_count = C.int32_t(len(p.Compute))
		for i, ci := range p.Compute {
			c.ci_profiles[i] = C.struct_gs_ci_profile{
				enumeration:   e.number("compute profile constant", ci.Enum),
				id:            C.uint32_t(ci.ID),
				slices:        e.number("slices", ci.Slices),
				max_instances: e.number("instances", ci.MaxInstances),
				sms:           e.number("multiprocessors", ci.SMs),
			}
		}
	}
}

func (e *encoder) placement(p machine.Placement) C.struct_gs_placement {
	return C.struct_gs_placement{start: e.number("placement", p.Start), size: e.number("placement", p.Size)}
}

func (e *encoder) instance(c *C.struct_gs_instance, gpu int, in *machine.GPUInstance) {
	old := e.earlier(gpu, in)
	c.id = e.number("GPU instance id", in.ID)
	c.profile_id = C.uint32_t(in.ProfileID)
	c.placement = e.placement(in.Placement)
	c.serial = e.next(old != nil)
	if old != nil {
		c.serial = old.serial
	}
	if !e.fits("compute instances", len(in.Compute), C.GS_MAX_COMPUTE) {
		return
	}
	c.compute_count = C.int32_t(len(in.Compute))
	for i := range in.Compute {
		ci := &in.Compute[i]
		was := earlierCompute(old, ci)
		c.compute[i].id = e.number("compute instance id", ci.ID)
		c.compute[i].profile_id = C.uint32_t(ci.ProfileID)
		c.compute[i].placement = e.placement(ci.Placement)
		c.compute[i].compute_mode = e.number("compute mode", ci.ComputeMode)
		e.text(c.compute[i].uuid[:], "UUID", ci.UUID)
		c.compute[i].serial = e.next(was != nil)
		if was != nil {
			c.compute[i].serial = was.serial
		}
	}
}

// next takes a new serial unless an old one is kept.
func (e *encoder) next(kept bool) C.uint64_t {
	if kept {
		return 0
	}
	e.serial++
	return e.serial - 1
}

// earlier finds the same GPU instance in the machine before the change.
func (e *encoder) earlier(gpu int, in *machine.GPUInstance) *C.struct_gs_instance {
	if e.before == nil || gpu >= int(e.before.gpu_count) {
		return nil
	}
	g := &e.before.gpus[gpu]
	for i := range int(g.instance_count) {
		old := &g.instances[i]
		if int(old.id) == in.ID && uint32(old.profile_id) == in.ProfileID && int(old.placement.start) == in.Placement.Start {
			return old
		}
	}
	return nil
}

func earlierCompute(in *C.struct_gs_instance, ci *machine.ComputeInstance) *C.struct_gs_compute {
	if in == nil {
		return nil
	}
	for i := range int(in.compute_count) {
		if old := &in.compute[i]; int(old.id) == ci.ID && C.GoString(&old.uuid[0]) == ci.UUID {
			return old
		}
	}
	return nil
}
