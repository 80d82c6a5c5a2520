// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// trouble is something that is wrong with the hardware for some steps.
type trouble struct {
	steps int
	end   func() error
	// endsPrograms reports for which GPUs it may end programs that use MPS; nil: for
	// none.
	endsPrograms func(gpu int) bool
}

// endTroubles ends those whose time has come, or all.
func (s *soak) endTroubles(all bool) error {
	var errs []error
	s.troubles = slices.DeleteFunc(s.troubles, func(t *trouble) bool {
		if t.steps--; t.steps > 0 && !all {
			return false
		}
		s.remember("a trouble ends")
		errs = append(errs, t.end())
		return true
	})
	return errors.Join(errs...)
}

// addTrouble is for a trouble that has begun.
func (s *soak) addTrouble(end func() error) *trouble {
	for _, d := range s.drivers {
		d.troubled = true
	}
	begun := &trouble{steps: 1 + s.IntN(6), end: end}
	s.troubles = append(s.troubles, begun)
	return begun
}

func (s *soak) inject(f machine.Fault) error {
	s.remember("fault %+v", f)
	fault, err := s.n.TryInject(f)
	if err != nil {
		return err
	}
	end := func() error {
		struck, err := fault.TryRemove()
		if struck > 0 {
			s.done["fault that struck"]++
		}
		return err
	}
	if strings.HasPrefix(f.Function, state.MPS) {
		// The supervisor starts a daemon anew that is killed, fails or does not answer,
		// and its server with it.
		s.upset(func(gpu int) bool { return f.GPU < 0 || f.GPU == gpu }, end)
		return nil
	}
	s.addTrouble(end)
	return nil
}

// soakCodes are failures that do not claim that something is not there.
var soakCodes = []int{
	harness.NVMLNoPermission, harness.NVMLTimeout, harness.NVMLGPUIsLost, harness.NVMLResetRequired, harness.NVMLInUse, harness.NVMLMemory, harness.NVMLNoResources, harness.NVMLUnknown,
}

// addFault makes calls of one function go wrong. Only functions that change
// something lie about success: nobody can do without believing the others.
func (s *soak) addFault() error {
	f, err := s.randomFault()
	if err != nil {
		return err
	}
	f.Times = s.IntN(4)
	if f.Times == 0 && s.chance(2) {
		f.Probability = 0.5
	}
	f.Code = soakCodes[s.IntN(len(soakCodes))]
	effects := []machine.Effect{machine.Fail, machine.Fail, machine.Fail, machine.KillBefore}
	if harness.IsChange(f.Function) {
		effects = append(effects, machine.FailAfter, machine.FailAfter, machine.Pretend, machine.KillAfter)
	}
	f.Effect = effects[s.IntN(len(effects))]
	if f.Effect == machine.KillBefore || f.Effect == machine.KillAfter {
		f.Times, f.Probability = 1, 0
	}
	return s.inject(f)
}

// addHang keeps calls of one function until the trouble ends.
func (s *soak) addHang() error {
	f, err := s.randomFault()
	if err != nil {
		return err
	}
	f.Effect, f.Hang = machine.Proceed, true
	return s.inject(f)
}

// randomFault chooses one of the functions that were called so far, or the one that
// will be called first.
func (s *soak) randomFault() (machine.Fault, error) {
	calls, err := s.n.State.Calls()
	if err != nil {
		return machine.Fault{}, err
	}
	var functions, changes []string
	for name := range calls {
		functions = append(functions, name)
		if harness.IsChange(name) {
			changes = append(changes, name)
		}
	}
	if len(functions) == 0 {
		// A driver registers before it loads the library.
		functions = []string{"nvmlInitWithFlags"}
	}
	slices.Sort(functions)
	slices.Sort(changes)
	if len(changes) > 0 && s.chance(2) {
		functions = changes
	}
	gpu := -1
	if s.chance(2) {
		gpu = s.IntN(len(s.machine.GPUs))
	}
	return machine.Fault{Function: functions[s.IntN(len(functions))], GPU: gpu, Skip: s.IntN(2)}, nil
}

// breakGPU makes all calls on one GPU fail.
func (s *soak) breakGPU() error {
	gpu := s.IntN(len(s.machine.GPUs))
	failure := []int{harness.NVMLGPUIsLost, harness.NVMLResetRequired}[s.IntN(2)]
	s.remember("GPU %d is broken: %d", gpu, failure)
	set := func(value int) error {
		return s.n.State.Update(func(m *machine.Machine) error {
			m.GPUs[gpu].Failure = value
			return nil
		})
	}
	if err := set(failure); err != nil {
		return err
	}
	s.addTrouble(func() error { return set(0) })
	return nil
}

// reboot ends everything that runs, and everything that does not survive that.
// No claim is held until the kubelet has prepared it again.
func (s *soak) reboot() error {
	if err := s.killAll(); err != nil {
		return err
	}
	s.closeMPS()
	if err := s.n.ClearMPS(); err != nil {
		return err
	}
	if err := sysroot.Reboot(s.n.Root, sysroot.RebootOptions{Renumber: s.chance(2)}); err != nil {
		return err
	}
	for _, c := range s.claims {
		c.held = false
	}
	entries, err := os.ReadDir(s.n.CDIDir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(s.n.CDIDir, e.Name())))
	}
	return err
}
