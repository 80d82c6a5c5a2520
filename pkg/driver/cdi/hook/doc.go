// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hook is the OCI hook of containers with devices that promise limits. A
// CUDA program that cannot reach its MPS control daemon runs without MPS and without
// limits, and one whose container mixes devices can have limits that are missing or
// for another device; neither says so. So the hook refuses such a container.
//
// It is a createRuntime hook: the runtime runs it after it made the container's
// namespaces and in its own, so that paths and PIDs are the host's. (A createContainer
// hook is in the container's PID namespace, and is not told who listens on a socket.) It
// runs as root of the host, and much of what it reads was written by the container's
// owner: nothing comes from the environment, everything that is read has a limit, and
// what is repeated in messages is quoted.
package hook

// What the program's arguments are made of.
const (
	// MPSClientCommand asks for CheckMPSClient.
	MPSClientCommand = "mps-client"
	// ControlFlag gives it the path of the daemon's socket.
	ControlFlag = "control"
	// SessionFlag gives it the session's name.
	SessionFlag = "session"

	// SoftwareLimitsCommand asks for CheckSoftwareLimits.
	SoftwareLimitsCommand = "software-limits"

	// MemoryLimitCommand asks for LimitMemory.
	MemoryLimitCommand = "memory-limit"
	// SocketsFlag gives it the folder with the plugin's socket.
	SocketsFlag = "sockets"
	// GPUFlag gives it the PCI address of the GPU.
	GPUFlag = "gpu"
	// UUIDFlag gives it the GPU's UUID.
	UUIDFlag = "uuid"
	// SoftFlag gives it the bytes that are kept for the container.
	SoftFlag = "soft"
	// HardFlag gives it the bytes that the container can have.
	HardFlag = "hard"
)
