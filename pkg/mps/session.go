// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import "time"

// Spec is an MPS session that is wanted: one control daemon and one server for a
// set of GPUs, or for one MIG partition.
type Spec struct {
	// ID names the session on this node: a DNS label of at most 63 bytes. It is
	// part of paths.
	ID string `json:"id"`
	// Devices are the UUIDs of GPUs ("GPU-…"), or the one of a MIG device
	// ("MIG-…"), in the order in which clients are to number them from 0.
	Devices []string `json:"devices"`
	// ThreadPercentage is the most that a client may use of the multiprocessors,
	// 1 to 100. 0 sets no limit.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// Memory is the most device memory that a client may use, by the UUID of the
	// device, in bytes; MPS counts in MiB and what is left over is cut off. A
	// device without an entry has no limit. MPS cannot take a limit away from a
	// session that runs: give the device's whole memory instead.
	Memory map[string]int64 `json:"memory,omitempty"`
	// MultiUser lets clients of different users run at the same time.
	MultiUser bool `json:"multiUser,omitempty"`
}

// Phase is what a session is doing.
type Phase string

const (
	// Starting says that daemon or server are not ready yet, for the first time or
	// again after one of them ended.
	Starting Phase = "starting"
	// Running says that clients can connect, and that the limits are in effect.
	Running Phase = "running"
	// Faulted says that a client's fault ended all clients, and that the server takes
	// no new ones before those have gone.
	Faulted Phase = "faulted"
	// Failed says that it cannot be started, or not be removed. It is tried again,
	// and Message says why it fails.
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
