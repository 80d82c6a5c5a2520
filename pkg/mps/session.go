// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package mps is the supervisor of MPS control daemons and its protocol.
//
// The supervisor runs on the node by itself, so that MPS outlives every restart
// and upgrade of the kubelet plugin: clients die with their server. Its clients
// speak gRPC to it over a unix socket. It knows nothing about Kubernetes, claims
// or NVML.
package mps

import "time"

// Spec is an MPS session that is wanted: one control daemon and one server for a
// set of GPUs, or for one MIG partition.
type Spec struct {
	// ID names the session on this node: a DNS label of at most 63 bytes. It is
	// part of paths.
	ID string
	// Devices are the UUIDs of GPUs ("GPU-…"), or the one of a MIG device
	// ("MIG-…"), in the order in which clients are to number them from 0.
	Devices []string
	// ThreadPercentage is the most that a client may use of the multiprocessors,
	// 1 to 100. 0 sets no limit.
	ThreadPercentage int
	// Memory is the most device memory that a client may use, by the UUID of the
	// device, in bytes; MPS counts in MiB and what is left over is cut off. A
	// device without an entry has no limit.
	Memory map[string]int64
	// MultiUser lets clients of different users run at the same time.
	MultiUser bool
}

// Phase is what a session is doing.
type Phase string

const (
	// Starting: the daemon or its server is not ready for the first time, or
	// again after it ended.
	Starting Phase = "starting"
	// Running: clients can connect, the limits are in effect.
	Running Phase = "running"
	// Faulted: a client's fault ended all clients, and the server takes no new
	// ones before those have gone.
	Faulted Phase = "faulted"
	// Failed: it cannot be started; it is tried again, and Message says why.
	Failed Phase = "failed"
)

// Status is a session as it is.
type Status struct {
	Spec  Spec
	Phase Phase
	// Message is for people, empty while all is well.
	Message string
	// Losses counts how often clients lost their server since the session was
	// started: its daemon or server ended, or a fault ended all clients. It
	// survives the supervisor.
	Losses int
	// LastLoss says what happened, and when. Empty without losses.
	LastLoss     string
	LastLossTime time.Time
	// Servers are the processes that hold the devices on behalf of clients.
	Servers []int
	// Clients are the processes that use the session now, where the daemon
	// tells. The ids are those of the supervisor's PID namespace.
	Clients []int
	// PipeDir and ShmDir are folders of the host that clients need: the first
	// wherever CUDA_MPS_PIPE_DIRECTORY says, the second as /dev/shm.
	PipeDir, ShmDir string
}
