// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"encoding/json"
	"io"

	"github.com/partage-dev/partage/test/gpusim/cuda"
)

// What goes over connections to the sockets, as JSON, each value in a packet of its
// own. The protocol is this stand-in's own.

// packets reads the values. What of a packet does not fit into the reader's buffer
// would be lost, so it has room for the largest one.
func packets(c io.Reader) *json.Decoder { return json.NewDecoder(bufio.NewReaderSize(c, maxPacket)) }

// hello is the first thing that a CUDA program says.
type hello struct{}

// Commands and what comes of them, at privilegedSocket.
type (
	command struct {
		Line string `json:"line"`
		// Token is what the file says that was asked for.
		Token string `json:"token,omitempty"`
	}
	result struct {
		Text   string `json:"text"`
		Failed bool   `json:"failed,omitempty"`
		// Shared is a file in SharedMemory. The daemon wants to know what it says before it takes
		// the command.
		Shared string `json:"shared,omitempty"`
	}
)

// welcome is what a program hears first, from the server or, if there is none,
// from the daemon. A code says that it is not welcome.
type welcome struct {
	Code cuda.Error `json:"code,omitempty"`
	// Devices are the UUIDs of the server's devices, in its order.
	Devices []string `json:"devices,omitempty"`
	// Shared is a file in SharedMemory, or empty where the server's has no name.
	Shared string `json:"shared,omitempty"`
}

// join is the program's answer.
type join struct {
	// Token is what the shared file says.
	Token string `json:"token"`
	// Devices are those of the server's that the program uses, with the limits
	// that it sets for itself.
	Devices []Limits `json:"devices"`
	// Void says that memory limits do not hold for the program, the server's included.
	Void bool `json:"void,omitempty"`
	// Priority is the one that the program sets for itself, or nil.
	Priority *priority `json:"priority,omitempty"`
}

// Limits are what a client may use of a device.
type Limits struct {
	UUID string `json:"uuid"`
	// Percentage of the multiprocessors.
	Percentage float64 `json:"percentage"`
	// Memory in bytes; 0 is no limit.
	Memory uint64 `json:"memory"`
}

// joined is the server's answer to that. Devices have the limits in effect.
type joined struct {
	Code    cuda.Error `json:"code,omitempty"`
	Devices []Limits   `json:"devices,omitempty"`
	// Priority is the client's.
	Priority priority `json:"priority,omitempty"`
}

// request is what a client wants of a device that it has joined.
type request struct {
	Op     operation `json:"op"`
	Device int       `json:"device"`
	Bytes  uint64    `json:"bytes,omitempty"`
}

// operation is what a program can do with a device. All but synchronize and memory
// make its context where it has none.
type operation string

const (
	opContext     operation = "context"     // cuDevicePrimaryCtxRetain
	opNewContext  operation = "newContext"  // cuCtxCreate: one more
	opAllocate    operation = "alloc"       // cuMemAlloc
	opLaunch      operation = "launch"      // a kernel that runs until it is synchronised
	opSynchronize operation = "synchronize" // cuCtxSynchronize
	opMemory      operation = "memory"      // cuMemGetInfo
	opFault       operation = "fault"       // an illegal access
)

// reply is to a request, or, with Ended, says without one that the client's
// contexts are no good any more.
type reply struct {
	Code  cuda.Error `json:"code,omitempty"`
	Ended bool       `json:"ended,omitempty"`
	// Free and Total answer opMemory.
	Free  uint64 `json:"free,omitempty"`
	Total uint64 `json:"total,omitempty"`
}
