// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import "time"

// Usage is who uses what of a GPU at one moment. What the GPU or its driver does not report
// is nil, which is not zero.
type Usage struct {
	// Time is when reading it had ended.
	Time time.Time
	// UsedBytes is the memory that programs have, without what the driver keeps for itself.
	UsedBytes uint64
	// Utilization is the part of the time, 0 to 1, in which a kernel ran. A GPU whose MIG
	// mode is on does not report it.
	Utilization *float64
	// Partitions are those that were asked for and exist.
	Partitions []PartitionUsage
	// Processes are those with a context, MPS servers and clients included, each once for
	// each GPU instance that it uses. Empty means that there are none.
	Processes []ProcessUsage
	// ProcessUtilization says that processes on the undivided GPU have one, which is zero
	// for those that do nothing.
	ProcessUtilization bool
	// PowerWatts is what the board draws.
	PowerWatts *float64
	// NVLink are the bytes that went over all of its links since the driver was loaded. There are
	// none to count while MIG mode is on.
	NVLink *Traffic
	// PCIe are bytes a second.
	PCIe *Traffic
}

// Traffic is what a GPU sends and receives.
type Traffic struct{ Sent, Received uint64 }

// PartitionID finds a partition among those that exist on a GPU. Every creation gives new values. Without the UUID, the ids
// may be those of a later partition.
type PartitionID struct {
	InstanceID int    `json:"instanceID"`
	ComputeID  int    `json:"computeID"`
	UUID       string `json:"uuid"`
}

// PartitionUsage is who uses what of a partition.
type PartitionUsage struct {
	PartitionID

	UsedBytes uint64
	// Utilization is the part of the time, 0 to 1, in which a kernel ran.
	Utilization *float64
}

// ProcessUsage is what a process uses of a GPU or of a GPU instance.
type ProcessUsage struct {
	Process

	// MemoryBytes is its device memory.
	MemoryBytes *uint64
	// Utilization is the part of the multiprocessors' time, 0 to 1, that its kernels had. It
	// is not reported for processes on partitions.
	Utilization *float64
}
