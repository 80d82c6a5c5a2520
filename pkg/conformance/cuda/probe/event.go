// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package probe runs cuda-probe, a small CUDA program, and reads what it says: what
// a program gets in the surroundings that the caller makes for it.
package probe

// Event is a line of JSON that cuda-probe prints. Fields that do not belong to the
// kind are zero.
type Event struct {
	Kind Kind `json:"event"`

	// Library and Version are of Loaded; Version is 13000 for CUDA 13.0.
	Library string `json:"library,omitempty"`
	Version int    `json:"version,omitempty"`

	// Milliseconds is how long cuInit (Initialized) or cuCtxCreate (Context) took.
	Milliseconds float64 `json:"milliseconds,omitempty"`
	// Devices is how many the process sees (Initialized).
	Devices int `json:"devices,omitempty"`

	// Device is the number of the device, of Device and Context.
	Device int    `json:"device,omitempty"`
	Name   string `json:"name,omitempty"`
	// UUID is without the prefix that NVML has.
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

	// Bytes is an allocation (Allocated, Refused), AllocatedBytes the sum of all.
	Bytes          uint64 `json:"bytes,omitempty"`
	AllocatedBytes uint64 `json:"allocatedBytes,omitempty"`

	// PID is the process as it sees itself (Holding).
	PID int `json:"pid,omitempty"`

	// Call, Code and Result are of a call that failed (Failed, Refused): "cuInit", 100,
	// "CUDA_ERROR_NO_DEVICE". Without a Call, Result says what else went wrong.
	Call   string `json:"call,omitempty"`
	Code   int    `json:"code,omitempty"`
	Result string `json:"result,omitempty"`
}

// Kind is what an event says.
type Kind string

// The kinds, in the order in which they come.
const (
	Loaded      Kind = "loaded"      // libcuda is loaded
	Initialized Kind = "initialized" // cuInit has succeeded
	Device      Kind = "device"      // one for each device
	Context     Kind = "context"     // there is a context on a device
	Memory      Kind = "memory"      // what cuMemGetInfo says, before allocations and after them
	Allocated   Kind = "allocated"   // an allocation, or with a bound what all of them came to
	Refused     Kind = "refused"     // an allocation failed; others may follow
	Holding     Kind = "holding"     // all is done, the context stays until the program is asked to end
	Failed      Kind = "failed"      // a call failed, which is the end
	Done        Kind = "done"        // the program ends, its context is destroyed
)
