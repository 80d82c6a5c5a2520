// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"slices"

	"github.com/partage-dev/partage/test/gpusim/state"
)

// The functions that faults of the machine can name. Beside them there is one for
// each command of the control daemon.
const (
	// ControlStart is the start of a control daemon, up to the point where it
	// takes connections.
	ControlStart = state.MPS + "control_start"
	// ServerStart is the start of a server, while its status is INITIALIZING.
	ServerStart = state.MPS + "server_start"
	// ClientConnect is the server's part of a client's start.
	ClientConnect = state.MPS + "client_connect"
	// ClientAlloc is the server's part of an allocation.
	ClientAlloc = state.MPS + "client_alloc"
)

// Functions are all that a machine's faults can name here. Calls of commands and
// of ControlStart are those of a daemon, the others those of a server: that is
// what a fault kills.
func Functions() []string {
	names := []string{ControlStart, ServerStart, ClientConnect, ClientAlloc}
	for name := range commands {
		names = append(names, state.MPS+name)
	}
	slices.Sort(names)
	return names
}
