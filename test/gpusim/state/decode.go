// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import "github.com/partage-dev/partage/test/gpusim/machine"

// decode makes Go values of a consistent C machine. What was counted comes from
// the file itself.
func decode(h *C.struct_gs_handle, c *C.struct_gs_machine) *machine.Machine {
	m := &machine.Machine{
		Name:              C.GoString(&c.name[0]),
		DriverVersion:     C.GoString(&c.driver_version[0]),
		NVMLVersion:       C.GoString(&c.nvml_version[0]),
		CUDADriverVersion: int(c.cuda_driver_version),
		BootID:            C.GoString(&c.boot_id[0]),
		MovingMinors:      c.moving_minors != 0,
		CoherentMemory:    machine.CoherentMemory(c.coherent_memory),
		Faults:            decodeFaults(h, c),
		Latencies:         decodeLatencies(c),
		Events:            decodeEvents(c),
		NICs:              decodeNICs(c),
		MPS: machine.MPS{
			HarmlessKills: c.mps_harmless_kills != 0, NamedSharedMemory: c.mps_named_shared_memory != 0, FewFiles: c.mps_few_files != 0,
			NoPriorities: c.mps_no_priorities != 0, ControlNeedsSharedMemory: c.mps_control_needs_shared_memory != 0,
		},
	}
	for i := range int(c.gpu_count) {
		m.GPUs = append(m.GPUs, decodeGPU(&c.gpus[i]))
	}
	for i := range int(c.process_count) {
		p := &c.processes[i]
		m.Processes = append(m.Processes, machine.Process{
			PID: int(p.pid), Name: C.GoString(&p.name[0]), GPU: int(p.gpu),
			InstanceID: int(p.instance_id), ComputeID: int(p.compute_id), MemoryBytes: uint64(p.memory_bytes), SM: int(p.sm),
			Kind: machine.ProcessKind(p.kind), Owner: uint64(p.owner), Pipe: C.GoString(&p.pipe[0]),
			Status: machine.MPSStatus(p.status), Fault: p.fault != 0,
		})
	}
	return m
}

func decodeGPU(c *C.struct_gs_gpu) machine.GPU {
	g := machine.GPU{
		Board:          C.GoString(&c.board[0]),
		UUID:           C.GoString(&c.uuid[0]),
		Serial:         C.GoString(&c.serial[0]),
		ProductName:    C.GoString(&c.product_name[0]),
		Brand:          int(c.brand),
		Architecture:   int(c.architecture),
		ComputeMajor:   int(c.compute_major),
		ComputeMinor:   int(c.compute_minor),
		Minor:          int(c.minor),
		PCIAddress:     C.GoString(&c.pci_address[0]),
		PCIDeviceID:    uint32(c.pci_device_id),
		PCISubsystem:   uint32(c.pci_subsystem),
		PCIeRoot:       C.GoString(&c.pcie_root[0]),
		PCIeSwitch:     C.GoString(&c.pcie_switch[0]),
		Clique:         machine.Clique{ClusterUUID: C.GoString(&c.cluster_uuid[0]), ID: int(c.clique_id)},
		NVLinks:        decodeNVLinks(c),
		NUMANode:       int(c.numa_node),
		MemoryBytes:    uint64(c.memory_bytes),
		ReservedBytes:  uint64(c.reserved_bytes),
		ContextBytes:   uint64(c.context_bytes),
		MPSServerBytes: uint64(c.mps_server_bytes),
		Cores:          int(c.cores),
		AddressingMode: int(c.addressing_mode),
		ECC:            int(c.ecc),
		ComputeMode:    int(c.compute_mode),
		Persistence:    c.persistence != 0,
		TimeSlice:      int(c.time_slice),
		Failure:        int(c.failure),
		NoEvents:       c.no_events != 0,
		Resets:         int(c.resets),
		Health:         decodeHealth(&c.health),
		Meters: machine.Meters{
			PowerMilliwatts: int(c.meters.milliwatts), NVLinkTx: uint64(c.meters.nvlink_tx_kib), NVLinkRx: uint64(c.meters.nvlink_rx_kib),
			PCIeTx: int(c.meters.pcie_tx_kb), PCIeRx: int(c.meters.pcie_rx_kb),
		},
	}
	if c.mig_capable != 0 {
		g.MIG = decodeMIG(c)
	}
	return g
}

func decodeMIG(c *C.struct_gs_gpu) *machine.MIG {
	m := &machine.MIG{
		Current:       c.mig_current != 0,
		Pending:       c.mig_pending != 0,
		ResetToSwitch: c.reset_to_switch != 0,
		MemorySlices:  int(c.memory_slices),
		ContextBytes:  uint64(c.mig_context_bytes),
	}
	for i := range int(c.profile_count) {
		m.Profiles = append(m.Profiles, decodeProfile(&c.profiles[i]))
	}
	for i := range int(c.instance_count) {
		m.Instances = append(m.Instances, decodeInstance(&c.instances[i]))
	}
	return m
}

func decodeProfile(c *C.struct_gs_profile) machine.GIProfile {
	p := machine.GIProfile{
		Enum: int(c.enumeration), ID: uint32(c.id), Name: C.GoString(&c.name[0]),
		Slices: int(c.slices), MaxInstances: int(c.max_instances), SMs: int(c.sms),
		CopyEngines: int(c.copy_engines), Decoders: int(c.decoders), Encoders: int(c.encoders),
		JPEG: int(c.jpeg), OFA: int(c.ofa), MemoryMiB: uint64(c.memory_mib), ReservedMiB: uint64(c.reserved_mib),
	}
	for i := range int(c.placement_count) {
		p.Placements = append(p.Placements, decodePlacement(c.placements[i]))
	}
	for i := range int(c.instance_id_count) {
		p.InstanceIDs = append(p.InstanceIDs, int(c.instance_ids[i]))
	}
	for i := range int(c.ci_profile_count) {
		ci := &c.ci_profiles[i]
		p.Compute = append(p.Compute, machine.CIProfile{
			Enum: int(ci.enumeration), ID: uint32(ci.id), Slices: int(ci.slices),
			MaxInstances: int(ci.max_instances), SMs: int(ci.sms),
		})
	}
	return p
}

func decodeInstance(c *C.struct_gs_instance) machine.GPUInstance {
	in := machine.GPUInstance{ID: int(c.id), ProfileID: uint32(c.profile_id), Placement: decodePlacement(c.placement)}
	for i := range int(c.compute_count) {
		ci := &c.compute[i]
		in.Compute = append(in.Compute, machine.ComputeInstance{
			ID: int(ci.id), ProfileID: uint32(ci.profile_id), Placement: decodePlacement(ci.placement),
			UUID: C.GoString(&ci.uuid[0]), ComputeMode: int(ci.compute_mode),
		})
	}
	return in
}

func decodePlacement(p C.struct_gs_placement) machine.Placement {
	return machine.Placement{Start: int(p.start), Size: int(p.size)}
}
