// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package mps is what the stand-ins of nvidia-cuda-mps-control and
// nvidia-cuda-mps-server do, and the side of MPS that is part of a CUDA program.
//
// A control daemon listens at <pipe folder>/control for programs, and at
// control_privileged for commands. It starts a server when the first client comes,
// or when it is told to, and hands the clients' connections over to it. From then on client and server are among themselves. The server is
// a process that holds its GPUs on the simulated machine, keeps the accounts of
// its clients there, and enforces their limits. Its entries in the machine's
// state are gone when it is, however it ended (state.File.Own).
//
// README.md says which of this NVIDIA documents and which is assumed.
package mps

import (
	"os"
	"path/filepath"
)

// The variables that NVIDIA's programs read.
const (
	PipeVariable       = "CUDA_MPS_PIPE_DIRECTORY"
	LogVariable        = "CUDA_MPS_LOG_DIRECTORY"
	VisibleVariable    = "CUDA_VISIBLE_DEVICES"
	PercentageVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	MemoryVariable     = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	PriorityVariable   = "CUDA_MPS_CLIENT_PRIORITY"
)

const (
	serverProgram = "nvidia-cuda-mps-server"
	defaultPipe   = "/tmp/nvidia-mps"
	defaultLog    = "/var/log/nvidia-mps"
	// SharedMemory is where a server and its clients meet, each in its own view
	// of the file system.
	SharedMemory = "/dev/shm"
)

// PipeDirectory is the folder of the control daemon that this process means.
func PipeDirectory() string { return directory(PipeVariable, defaultPipe) }

func directory(variable, otherwise string) string {
	if dir := os.Getenv(variable); dir != "" {
		return filepath.Clean(dir)
	}
	return otherwise
}

// Files in the pipe folder.
const (
	// controlSocket is for programs of all users.
	controlSocket = "control"
	// privilegedSocket is for commands of the daemon's user and root.
	privilegedSocket = "control_privileged"
	lockFile         = "control_lock"
	// logPipe is a FIFO into which everybody may write, and which ends up in the
	// daemon's log.
	logPipe = "log"
	pidFile = "nvidia-cuda-mps-control.pid"
)

// network is the type of the sockets, SOCK_SEQPACKET.
const network = "unixpacket"
