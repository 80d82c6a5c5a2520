// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hook is the OCI hook of containers with devices that promise limits. A
// CUDA program that cannot reach its MPS control daemon runs without MPS and without
// limits, and one whose container mixes devices can have limits that are missing or
// for another device; neither says so. So the hook refuses such a container.
//
// It is a createContainer hook: the runtime runs it after it made the container's
// namespaces and before it changes the root, so that paths are the host's.
package hook

const (
	// Command is the sub-command of the supervisor's program that is the hook.
	Command = "container-hook"

	// ControlFlag gives the path of the daemon's socket to CheckMPSClient.
	ControlFlag = "control"
	// SessionFlag gives the session's name to CheckMPSClient.
	SessionFlag = "session"
	// SoftwareLimitsFlag asks for CheckSoftwareLimits.
	SoftwareLimitsFlag = "software-limits"
)
