// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// The functions that faults of the machine can name. Beside them there is one for
// each command of the control daemon.
const (
	// ControlStart is the start of a control daemon, up to the point where it
	// takes connections.
	ControlStart = state.Programs + "control_start"
	// ServerStart is the start of a server, while its status is INITIALIZING.
	ServerStart = state.Programs + "server_start"
	// ClientConnect is the server's part of a client's start.
	ClientConnect = state.Programs + "client_connect"
	// ClientAlloc is the server's part of an allocation.
	ClientAlloc = state.Programs + "client_alloc"
)

// Functions are all that a machine's faults can name here. Calls of commands and
// of ControlStart are those of a daemon, the others those of a server: that is
// what a fault kills.
func Functions() []string {
	names := []string{ControlStart, ServerStart, ClientConnect, ClientAlloc}
	for name := range commands {
		names = append(names, state.Programs+name)
	}
	slices.Sort(names)
	return names
}

// errStruck is the failure that a fault asked for.
var errStruck = errors.New("failed because of a fault that was set for the simulated machine")

// around does what a function does, or what a fault wants in its place.
func around(f *state.File, function string, gpus []int, do func() error) error {
	s, err := f.Strike(function, gpus...)
	switch {
	case err != nil:
		return err
	case s == nil:
		return do()
	case s.Effect == machine.FailAfter || s.Effect == machine.KillAfter:
		if err := do(); err != nil {
			return err
		}
		endure(f, s)
		if s.Effect == machine.KillAfter {
			killSelf()
		}
		return errStruck
	}
	endure(f, s)
	switch s.Effect {
	case machine.Fail:
		return errStruck
	case machine.Pretend:
		return nil
	case machine.KillBefore:
		killSelf()
	}
	return do()
}

// look is how often something that hangs looks whether it is to go on.
const look = 2 * time.Millisecond

func endure(f *state.File, s *state.Strike) {
	time.Sleep(s.Delay)
	for s.Hang {
		hangs, err := f.Hangs(s)
		in, placeErr := f.InPlace()
		if err != nil || placeErr != nil || !hangs || !in {
			return
		}
		time.Sleep(look)
	}
}

func killSelf() {
	for {
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		time.Sleep(look)
	}
}
