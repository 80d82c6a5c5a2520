// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package gpu describes the GPUs of one node as plain values. Nothing here talks to
// hardware: package gpu/nvml produces these values, and every layer above works on
// them.
//
// A GPU is identified by its PCI address everywhere, because NVML indexes and device
// minors may change at a boot while the PCI address does not.
package gpu

import (
	"slices"
	"time"
)

// Node is everything that a node reports about its GPUs.
type Node struct {
	// DriverVersion is the kernel driver's version as NVML prints it, for
	// example "580.95.05". It is not a semantic version.
	DriverVersion string `json:"driverVersion"`
	// CUDAVersion is the newest CUDA version that the driver supports.
	CUDAVersion Version `json:"cudaVersion"`
	// GPUs are ordered by PCI address.
	GPUs []GPU `json:"gpus"`
	// Broken are the GPUs that could not be read. They are not in GPUs.
	Broken []Broken `json:"broken,omitempty"`
	// Unlisted are the PCI addresses of NVIDIA's GPUs that are on the bus, and that the driver
	// does not list: it could not start them, or has not taken them.
	Unlisted []string `json:"unlisted,omitempty"`
}

// Broken is a GPU that the driver lists and that does not answer.
type Broken struct {
	// Index is NVML's at the time of discovery.
	Index int `json:"index"`
	// PCIAddress is empty if even that could not be read.
	PCIAddress string `json:"pciAddress,omitempty"`
	// Reason is the text of Err, for output.
	Reason string `json:"reason"`
	Err    error  `json:"-"`
}

// Version is a two-part version such as a CUDA version or a compute capability.
type Version struct {
	Major int `json:"major"`
	Minor int `json:"minor"`
}

// GPU is one physical GPU.
type GPU struct {
	// PCIAddress is "dddd:bb:dd.f" in lower case.
	PCIAddress string `json:"pciAddress"`
	// UUID is NVML's, "GPU-…".
	UUID string `json:"uuid"`
	// Minor is N of /dev/nvidiaN and of the capability files. It can change
	// at every boot.
	Minor int `json:"minor"`

	// PCIDeviceID is vendor and device as lspci -nn prints them: "10de:2330".
	PCIDeviceID string `json:"pciDeviceID,omitempty"`

	ProductName string `json:"productName"`
	// Brand is "Nvidia", "Tesla", "NvidiaRTX", …, spelled as NVIDIA's DRA driver publishes it;
	// "Unknown" where the driver does not tell.
	Brand string `json:"brand"`
	// Architecture is "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", …,
	// spelled as the vendor's driver publishes it.
	Architecture      string  `json:"architecture"`
	ComputeCapability Version `json:"computeCapability"`

	// Resources of the undivided GPU. Multiprocessors and engine counts are zero if
	// the driver does not report them (GPUs without MIG).
	Resources Resources `json:"resources"`
	// ReservedBytes is the part of the undivided GPU's memory that the driver keeps
	// for itself, which Resources include. 0 if it is not known, as while MIG is on.
	ReservedBytes uint64 `json:"reservedBytes,omitempty"`

	// MemoryLimits says that the driver limits the memory of containers, by their cgroups.
	MemoryLimits bool `json:"memoryLimits,omitempty"`

	// AddressingMode is "HMM", "ATS" or "None"; empty if not reported.
	AddressingMode string `json:"addressingMode,omitempty"`
	// CoherentMemory is about GPUs that are coherent with the CPU, as in GH200 and GB200. Unless it is
	// empty the GPU cannot be partitioned.
	CoherentMemory CoherentMemory `json:"coherentMemory,omitempty"`
	// PCIeRoot is the root complex, "pci0000:16"; empty if sysfs has none.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// PCIeSwitch is the PCI address of the upstream port of the PCIe switch that the GPU is behind, or
	// of the one next to the root complex where there are several: "0000:17:00.0". Devices behind one
	// switch reach each other without the root complex. Empty if sysfs has none.
	PCIeSwitch string `json:"pcieSwitch,omitempty"`
	// NVLink is nil if the GPU has none, or if it is not known, as while MIG is on or before the
	// GPU is registered with the fabric of NVSwitches that it is connected to.
	NVLink *NVLink `json:"nvlink,omitempty"`
	// NUMANode is nil if the kernel reports no affinity (-1).
	NUMANode *int `json:"numaNode,omitempty"`

	// MIG is nil if the GPU cannot be partitioned.
	MIG *MIG `json:"mig,omitempty"`
}

// CoherentMemory is who manages the memory of a GPU that is coherent with the CPU.
type CoherentMemory string

// Values of CoherentMemory. It is empty where the kernel does, and for GPUs that are not coherent.
const (
	CoherentDriver  CoherentMemory = "driver"
	CoherentUnknown CoherentMemory = "unknown"
)

// Resources are the countable parts of a GPU or of a partition of it.
type Resources struct {
	MemoryBytes     uint64 `json:"memoryBytes"`
	Multiprocessors int    `json:"multiprocessors,omitempty"`
	CopyEngines     int    `json:"copyEngines,omitempty"`
	Decoders        int    `json:"decoders,omitempty"`
	Encoders        int    `json:"encoders,omitempty"`
	JPEGEngines     int    `json:"jpegEngines,omitempty"`
	OFAEngines      int    `json:"ofaEngines,omitempty"`
}

// MIG describes how a GPU can be partitioned.
type MIG struct {
	// Enabled is the mode at the time of discovery.
	Enabled bool `json:"enabled"`
	// Dynamic is true if the mode can be changed without a GPU reset (Hopper and
	// later, outside vGPU guests), so that it can follow the claims.
	Dynamic bool `json:"dynamic"`
	// MemorySlices is the number of memory slices, the unit of placements (8 on most
	// boards, 4 on A30, 12 on RTX PRO 6000).
	MemorySlices int `json:"memorySlices"`
	// Profiles are ordered by ID.
	Profiles []Profile `json:"profiles"`
}

// Profile is a GPU instance profile with all its placements. Profiles always come
// from the driver, never from a table.
type Profile struct {
	// ID is the driver's profile id ("nvidia-smi mig -lgip"), not NVML's
	// enumeration constant.
	ID uint32 `json:"id"`
	// Name is the driver's, without the "MIG " prefix: "1g.10gb+me".
	Name string `json:"name"`
	// Slices is the number of compute slices.
	Slices int `json:"slices"`
	// MaxInstances is how many of this profile fit on an empty GPU.
	MaxInstances int         `json:"maxInstances"`
	Resources    Resources   `json:"resources"`
	Placements   []Placement `json:"placements"`
}

// Placement is a run of memory slices.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Overlaps reports whether two placements on one GPU share a memory slice.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// MIGState is the MIG mode of a GPU and its instances at one moment.
type MIGState struct {
	Enabled bool
	// Pending differs from Enabled while a mode change waits for a GPU reset.
	Pending   bool
	Instances []Instance
}

// Instance is a live GPU instance. Its ID is the driver's and is not
// sequential; it is only unique while the instance lives.
type Instance struct {
	ID int
	// IDSince is from when on no other instance with a compute instance was seen to have the
	// ID, or zero for ever.
	IDSince   time.Time
	ProfileID uint32
	Placement Placement
	// Compute is empty if the compute instance was not created yet or is destroyed
	// already.
	Compute []ComputeInstance
}

// HasMIGDevice reports whether an instance is the partition with the UUID: one with a
// single compute instance.
func HasMIGDevice(instances []Instance, uuid string) bool {
	return slices.ContainsFunc(instances, func(i Instance) bool { return len(i.Compute) == 1 && i.Compute[0].UUID == uuid })
}

// ComputeInstance is a live compute instance.
type ComputeInstance struct {
	ID int
	// UUID is the MIG device's, "MIG-…". The driver makes it of the chip, the GPU instance's
	// ID and its place: whoever makes the same there again gets the same UUID.
	UUID string
	// Slices is how many of the GPU instance's compute slices it spans; 0 where the driver
	// does not say.
	Slices int
}

// Process is a process that uses a GPU or a GPU instance.
type Process struct {
	PID int
	// InstanceID is -1 for a process on the undivided GPU.
	InstanceID int
}

// ComputeMode is how many processes may use a GPU, or a MIG device, at one time.
type ComputeMode string

// Values of ComputeMode, as nvidia-smi -c names them.
const (
	// ComputeDefault allows any number of processes.
	ComputeDefault ComputeMode = "DEFAULT"
	// ComputeExclusiveProcess allows one process. With MPS this is the server, so that
	// a client that does not reach it gets nothing instead of everything.
	ComputeExclusiveProcess ComputeMode = "EXCLUSIVE_PROCESS"
	// ComputeProhibited allows none.
	ComputeProhibited ComputeMode = "PROHIBITED"
)

// NVLink is what a GPU's active NVLinks lead to. Links say nothing while MIG is on.
type NVLink struct {
	// Clique is "<cluster UUID>.<clique ID>" of a fabric that spans nodes, as in the label
	// nvidia.com/gpu.clique of nodes. Then GPUs and Switches are empty. It is empty where
	// the fabric ends with the node.
	Clique string `json:"clique,omitempty"`
	// GPUs are the PCI addresses of the GPUs to which links lead without a switch, sorted.
	GPUs []string `json:"gpus,omitempty"`
	// Switches are the PCI addresses of NVSwitches, sorted, with UnknownSwitch for those
	// of which the driver does not tell it.
	Switches []string `json:"switches,omitempty"`
}

// UnknownSwitch stands for all NVSwitches of a node whose addresses are not known.
const UnknownSwitch = "unknown"
