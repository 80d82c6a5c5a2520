// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package machine describes a simulated GPU machine as plain Go values. The
// catalogue makes them, package state writes them into the shared file that the
// simulated libnvidia-ml.so.1 works on, and reads them back.
//
// Numbers are NVML's: enumeration constants, units and ids mean what nvml.h
// says they mean.
package machine

import "time"

// Machine is one simulated host with its GPUs.
type Machine struct {
	Name              string // "dgx-h100"
	DriverVersion     string // "580.95.05"
	NVMLVersion       string // "13.580.95.05"
	CUDADriverVersion int    // 13000 is 13.0
	BootID            string // changes at reboot
	// MovingMinors: a GPU gets another minor when its MIG mode changes without a
	// reset. NVIDIA says that this may happen; that the new one is the lowest that is
	// free is assumed.
	MovingMinors bool
	// CoherentMemory is the parameter CoherentGPUMemoryMode of the driver's module.
	CoherentMemory CoherentMemory
	GPUs           []GPU
	NICs           []NIC
	Processes      []Process

	// Events are those that were not forgotten yet, oldest first. state.AddEvent adds one.
	Events []Event

	// Faults and Latencies make calls go wrong and take time. Without them all
	// calls work and take no time of their own. They survive a reboot.
	Faults    []Fault
	Latencies []Latency

	// MPS is how NVIDIA's MPS behaves here. It survives a reboot.
	MPS MPS
}

// MPS has the points in which NVIDIA's MPS differs between drivers, or in which
// nobody knows. The zero value is the strict choice, except for
// NamedSharedMemory and ControlNeedsSharedMemory.
type MPS struct {
	// HarmlessKills says that a client may be killed while it has work on a GPU.
	// Otherwise its server is undefined from then on.
	HarmlessKills bool
	// NamedSharedMemory says that a server has a file in its /dev/shm, which its clients must
	// see, as is assumed of drivers before 580.
	NamedSharedMemory bool
	// FewFiles says that servers do with any number of open files. Otherwise a limit
	// below 16384 is one of contexts.
	FewFiles bool
	// NoPriorities says that MPS has no client priorities, as in older drivers.
	NoPriorities bool
	// ControlNeedsSharedMemory says that commands are taken only from a program that
	// has the daemon's /dev/shm.
	ControlNeedsSharedMemory bool
}

// Fault makes calls of the library go wrong. Of several that match a call, the
// first in the list that strikes decides.
type Fault struct {
	// ID is unique on the machine and at least 1.
	ID int
	// Function is an exported name, "nvmlGpuInstanceDestroy" or "nvmlInit_v2",
	// or "*" for all of the library. Package mps names what the stand-ins of MPS
	// do, "mps_server_start", and "nvidia-smi" is a run of that program.
	Function string
	// GPU is an index into Machine.GPUs; -1 is any GPU, and also matches calls
	// that concern none, such as nvmlInit_v2. A call on an instance or MIG device
	// is on its GPU.
	GPU int
	// Skip is how many matching calls pass before the first that is struck, and
	// Times how many are struck then; 0 is all, until the fault is removed.
	Skip, Times int
	// Probability that a call is struck which Skip and Times leave; 0 means 1.
	Probability float64

	// Delay is added to a call that is struck. Hang keeps it until the fault is
	// removed, or state.File.LetGo lets the call go on. Both come before the call, or, for FailAfter and KillAfter, after
	// it.
	Delay time.Duration
	Hang  bool
	// AllGPUs: a call that is delayed or held has all GPUs locked, so that others on any GPU wait
	// until it goes on, struck or not. So does the driver wait for a GSP that hangs: 45 s for each
	// call, one after the other, under a lock of all GPUs.
	AllGPUs bool
	Effect  Effect
	// Code is an nvmlReturn_t, for Fail and FailAfter. Programs have no use for it.
	Code int

	// Seen and Struck count matching calls and those that were struck, of all
	// processes. They are read only: an update of the machine keeps them.
	Seen, Struck uint64
}

// Effect is what becomes of a call that is struck.
type Effect int

const (
	// Fail does nothing and returns Code.
	Fail Effect = iota
	// FailAfter does what it should, and returns Code.
	FailAfter
	// Pretend does nothing and returns SUCCESS, with the results untouched.
	Pretend
	// KillBefore sends the calling process SIGKILL instead.
	KillBefore
	// KillAfter sends the calling process SIGKILL when the change is committed.
	KillAfter
	// Proceed does nothing else; for Delay and Hang.
	Proceed
)

// Latency is how long calls of one function take, on top of the microseconds
// that the simulator needs. These are models, not measurements. Of what the stand-ins
// of MPS do, "mps_server_start" can have one, for each GPU of the server without
// persistence mode.
type Latency struct {
	Function string
	Base     time.Duration
	// PerInstance is added for each GPU instance that is on the GPU.
	PerInstance time.Duration
	// Exclusive calls on one GPU wait for each other, as on a driver lock.
	Exclusive bool
}

// GPU is one simulated GPU: its board's facts and its present state.
type GPU struct {
	Board string // key in the catalogue, "h100-80-sxm"

	UUID        string // "GPU-…"
	Serial      string
	ProductName string
	Brand       int // nvmlBrandType_t
	// Architecture is nvmlDeviceArchitecture_t: 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell.
	Architecture int
	ComputeMajor int
	ComputeMinor int

	Minor        int    // /dev/nvidia<Minor>
	PCIAddress   string // "0000:1b:00.0"
	PCIDeviceID  uint32 // (device << 16) | vendor, as nvmlPciInfo_t.pciDeviceId
	PCISubsystem uint32
	PCIeRoot     string // "pci0000:16", becomes the sysfs tree
	PCIeSwitch   string // the upstream port of the switch that it is behind, "0000:17:00.0"; "": none
	NUMANode     int    // -1: none

	MemoryBytes    uint64
	ReservedBytes  uint64
	ContextBytes   uint64 // of a CUDA context, beside what its program allocates
	MPSServerBytes uint64 // of an MPS server
	Cores          int    // CUDA cores (nvmlDeviceGetNumGpuCores)
	AddressingMode int    // nvmlDeviceAddressingModeType_t: 0 none, 1 HMM, 2 ATS; -1 not reported
	ECC            int    // 0 off, 1 on, -1 not supported

	ComputeMode int // nvmlComputeMode_t
	// Persistence is nvidia-smi -pm: the driver stays loaded without clients.
	Persistence bool
	TimeSlice   int // 0 default, 1 short, 2 medium, 3 long

	// Failure is the nvmlReturn_t of every call on this GPU; 0: it is well.
	// 15 GPU_IS_LOST and 16 RESET_REQUIRED are the ones that happen.
	Failure int

	// NoEvents: the GPU reports no events (nvmlDeviceGetSupportedEventTypes).
	NoEvents bool
	Health   Health
	Meters   Meters
	// Resets counts how often the GPU was reset. Handles from before one are refused.
	Resets int

	// NVLinks are the GPU's links by number; none: it has no NVLink.
	NVLinks []NVLink
	// Clique is where in an NVLink fabric the GPU is once it is registered (Health.Fabric).
	Clique Clique

	MIG *MIG // nil: not MIG capable
}

// NVLink is one link of a GPU.
type NVLink struct {
	// Remote is the PCI address of what the link leads to; "": NVML does not tell.
	Remote string
	// RemoteType is nvmlIntNvLinkDeviceType_t: 0 a GPU, 2 an NVSwitch, 255 unknown.
	RemoteType int
	Down       bool
}

// Clique is a set of GPUs that reach one another in an NVLink fabric, which can span machines.
type Clique struct {
	ClusterUUID string // "": all zeros, as where the fabric ends with the machine
	ID          int
}

// NIC is a network card. Only the PCI bus shows it.
type NIC struct {
	PCIAddress  string
	PCIDeviceID uint32 // (device << 16) | vendor
	PCIeRoot    string
	PCIeSwitch  string // as in GPU
	NUMANode    int
}

// Health is what a GPU reports about its own state. With its zero value a GPU is well, at
// 0 °C and in no NVLink fabric.
type Health struct {
	// VolatileECC counts since the last reset.
	VolatileECC, AggregateECC ECCErrors
	RemappedRows              RemappedRows
	// ChannelRepair and TPCRepair are pending until a reset.
	ChannelRepair, TPCRepair bool
	// Unrepairable memory stays so.
	Unrepairable bool
	// RetiredPagesPending, on GPUs that retire pages of memory instead of remapping rows.
	RetiredPagesPending bool

	RecoveryAction int // nvmlDeviceGpuRecoveryAction_t
	// ClocksReasons are nvmlClocksEventReason…, beside that of an idle GPU, which follows
	// from what processes do.
	ClocksReasons uint64
	Temperature   int // degrees Celsius
	Fabric        Fabric
}

// ECCErrors are numbers of memory errors.
type ECCErrors struct{ Corrected, Uncorrected uint64 }

// RemappedRows are rows of memory that were replaced.
type RemappedRows struct {
	Corrected, Uncorrected int // by cause
	Pending                bool
	Failed                 bool
}

// Fabric is a GPU's registration with the NVLink fabric.
type Fabric struct {
	State  int // nvmlGpuFabricState_t; 0: no fabric
	Status int // nvmlReturn_t
	Mask   uint32
}

// Event is something that NVML tells those who wait for it.
type Event struct {
	// Serial is 0 for an event that is being added.
	Serial uint64
	GPU    int    // index into Machine.GPUs
	Type   uint64 // nvmlEventType…, one of them
	XID    uint64
	// InstanceID and ComputeID are -1 where all of the GPU, or of the GPU instance, is
	// affected.
	InstanceID, ComputeID int
}

// MIG is the partitioning side of a GPU.
type MIG struct {
	Current bool
	Pending bool
	// ResetToSwitch is Ampere's behaviour: a mode change stays pending until a
	// reset or reboot, and survives both. Otherwise the change is immediate and
	// is lost at reboot.
	ResetToSwitch bool
	MemorySlices  int
	ContextBytes  uint64 // of a CUDA context on a MIG device
	Profiles      []GIProfile
	Instances     []GPUInstance
}

// GIProfile is a GPU instance profile.
type GIProfile struct {
	Enum         int    // NVML_GPU_INSTANCE_PROFILE_*
	ID           uint32 // the driver's id, nvidia-smi mig -lgip
	Name         string // "1g.10gb+me", without the "MIG " prefix
	Slices       int    // compute slices
	MaxInstances int
	SMs          int
	CopyEngines  int
	Decoders     int
	Encoders     int
	JPEG         int
	OFA          int
	MemoryMiB    uint64
	ReservedMiB  uint64 // of it, held by the driver
	Placements   []Placement
	// InstanceIDs are the GPU instance ids that the driver hands out for this
	// profile: the nth belongs to the nth placement, and those that are left
	// over serve when it is taken. Live instances never share one.
	InstanceIDs []int
	Compute     []CIProfile
}

// Instance returns the instance at the nth placement, with one compute instance that has all of it.
func (p *GIProfile) Instance(n int, uuid string) GPUInstance {
	all := p.Compute[0]
	return GPUInstance{
		ID: p.InstanceIDs[n], ProfileID: p.ID, Placement: p.Placements[n],
		Compute: []ComputeInstance{{ProfileID: all.ID, Placement: Placement{Size: all.Slices}, UUID: uuid}},
	}
}

// CIProfile is a compute instance profile inside a GPU instance profile.
type CIProfile struct {
	Enum         int    // NVML_COMPUTE_INSTANCE_PROFILE_*
	ID           uint32 // the driver's id
	Slices       int
	MaxInstances int
	SMs          int
}

// Placement is a run of memory slices (GPU instances) or compute slices
// (compute instances).
type Placement struct {
	Start int
	Size  int
}

// GPUInstance is a live GPU instance.
type GPUInstance struct {
	ID        int
	ProfileID uint32
	Placement Placement
	Compute   []ComputeInstance
}

// ComputeInstance is a live compute instance.
type ComputeInstance struct {
	ID        int
	ProfileID uint32
	Placement Placement
	UUID      string // "MIG-…"
	// ComputeMode is the MIG device's own: with MIG mode on, the GPU has none.
	ComputeMode int // nvmlComputeMode_t
}

// Process is a process that holds a GPU or an instance of it. One that holds
// several has several entries.
type Process struct {
	PID         int
	Name        string
	GPU         int // index into Machine.GPUs
	InstanceID  int // -1: the undivided GPU
	ComputeID   int // -1: none
	MemoryBytes uint64
	// SM is which percentage of the multiprocessors of what it holds the process keeps busy.
	SM   int
	Kind ProcessKind

	// Owner is 0 for a process that is an entry and nothing more. Else it is what
	// state.File.Own gave to the process that keeps the entry, which is gone as
	// soon as that process is, however it ended. Clients of an MPS server are
	// kept by the server. Entries that state.File.Hold made have one, too.
	Owner uint64

	// Pipe, Status and Fault are about MPS servers. Pipe is the folder of the
	// server's control daemon, as the server sees it. Setting Fault makes the
	// server do what it does when a client has a fatal fault on this GPU.
	Pipe   string
	Status MPSStatus
	Fault  bool
}

// ProcessKind is what NVML takes a process for.
type ProcessKind int

const (
	// Compute processes have a CUDA context of their own.
	Compute ProcessKind = iota
	// MPSServer processes have one for their clients.
	MPSServer
	// MPSClient processes use the context of a server.
	MPSClient
	// Handle processes only have device nodes open, as monitoring agents do. NVML
	// does not list them, and what they have open cannot be destroyed.
	Handle
)

// MPSStatus is the state of an MPS server.
type MPSStatus int

const (
	// MPSInitializing servers take no clients yet.
	MPSInitializing MPSStatus = iota
	// MPSActive servers do.
	MPSActive
	// MPSFault servers take none until those that a fault hit have gone.
	MPSFault
)

// String is the word that nvidia-cuda-mps-control prints.
func (s MPSStatus) String() string {
	return [...]string{"INITIALIZING", "ACTIVE", "FAULT"}[s]
}
