// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"syscall"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// ErrStruck is the failure that a fault asked for.
var ErrStruck = errors.New("failed because of a fault that was set for the simulated machine")

// Around does what a function of a program does on the given GPUs, or what a fault wants in its place. The library does
// the same for its own functions.
func (f *File) Around(function string, gpus []int, do func() error) error {
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
		f.endure(s)
		if s.Effect == machine.KillAfter {
			killSelf()
		}
		return ErrStruck
	}
	f.endure(s)
	switch s.Effect {
	case machine.Fail:
		return ErrStruck
	case machine.Pretend:
		return nil
	case machine.KillBefore:
		killSelf()
	}
	return do()
}

func killSelf() {
	for {
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	}
}
