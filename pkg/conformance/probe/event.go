// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package probe runs cuda-probe, a small CUDA program, and reads what it says: what
// a program gets in the surroundings that the caller makes for it.
package probe

// Event is a line of JSON that cuda-probe prints. Fields that do not belong to the
// kind are zero.
type Event struct {
	Kind Kind `json:"event"`

	// UUID is a Device's, without the prefix that NVML has.
	UUID string `json:"uuid,omitempty"`
	// Multiprocessors are the device's as the process is told (Device, Context).
	Multiprocessors int `json:"multiprocessors,omitempty"`
	// ContextMultiprocessors are those of the context, 0 where the driver cannot tell
	// (Context).
	ContextMultiprocessors int `json:"contextMultiprocessors,omitempty"`

	// FreeBytes and TotalBytes are what cuMemGetInfo says (Memory). TotalBytes also is
	// the size of a Device.
	FreeBytes  uint64 `json:"freeBytes,omitempty"`
	TotalBytes uint64 `json:"totalBytes,omitempty"`

	// AllocatedBytes is the sum of all allocations so far (Refused, Done).
	AllocatedBytes uint64 `json:"allocatedBytes,omitempty"`

	// Call and Result are of a call that failed (Failed, Refused): "cuInit",
	// "CUDA_ERROR_NO_DEVICE". Without a Call, Result says what else went wrong.
	Call   string `json:"call,omitempty"`
	Result string `json:"result,omitempty"`
}

// Kind is what an event says. Transcripts of earlier versions have others, too.
type Kind string

// The kinds, in the order in which they come.
const (
	Device  Kind = "device"  // one for each device
	Context Kind = "context" // there is a context on a device
	Memory  Kind = "memory"  // what cuMemGetInfo says, before allocations and after them
	Refused Kind = "refused" // an allocation failed
	Holding Kind = "holding" // all is done, the context stays until the program is asked to end
	Failed  Kind = "failed"  // a call failed, which is the end
	Done    Kind = "done"    // the program ends, its context is destroyed
)
