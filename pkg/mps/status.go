// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import "time"

// Phase is the state of a session.
type Phase string

const (
	// Starting means that the daemon or the server is not ready, for the first time or again
	// after one of them ended.
	Starting Phase = "starting"
	// Running means that clients can connect, and the limits are in effect.
	Running Phase = "running"
	// Faulted means that a client's fault ended all clients, and the server accepts no new
	// ones until those have ended.
	Faulted Phase = "faulted"
	// Failed means that the session cannot be started, or cannot be removed. The supervisor
	// keeps trying, and Message says why it fails.
	Failed Phase = "failed"
)

// History is what has happened to a session since it was started. It survives the supervisor.
type History struct {
	// Losses counts how often clients lost their server since the session was
	// started: its daemon or server ended, or a fault ended all clients.
	Losses int `json:"losses,omitempty"`
	// LastLoss and LastLossTime describe the last loss. They are zero without one.
	LastLoss     string    `json:"lastLoss,omitempty"`
	LastLossTime time.Time `json:"lastLossTime,omitzero"`
	// Kills counts how often a client was killed while others went on with a server whose
	// state is undefined after that. A server that was replaced because of it is a loss
	// instead. LastKill describes the last time.
	Kills    int    `json:"kills,omitempty"`
	LastKill string `json:"lastKill,omitempty"`
}

// Status describes the actual state of a session.
type Status struct {
	Spec  Spec  `json:"spec"`
	Phase Phase `json:"phase"`
	// Message explains the phase to people. It is empty while all is well.
	Message string `json:"message,omitempty"`
	History

	// Servers are the processes that hold the devices on behalf of clients.
	Servers []int `json:"servers,omitempty"`
	// Clients are the processes that use the session now, as far as the daemon
	// reports them. The PIDs are those of the supervisor's PID namespace.
	Clients []int `json:"clients,omitempty"`
	// PipeDir and ShmDir are folders of the host that clients need: the first
	// read-only, wherever CUDA_MPS_PIPE_DIRECTORY says, the second as /dev/shm. It is empty where
	// they need none: the server's shared memory has no name there, as with driver 580.
	PipeDir string `json:"pipeDir,omitempty"`
	ShmDir  string `json:"shmDir,omitempty"`
}
