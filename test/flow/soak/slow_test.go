// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"path/filepath"
	"slices"
	"time"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// addSlow makes something slow, and then a claim comes or goes. No call takes so long that the driver gives up waiting for
// it.
func (s *soak) addSlow() error {
	delay := time.Duration(20+s.IntN(280)) * time.Millisecond
	switch s.IntN(8) {
	case 0, 1:
		s.slowProc(delay)
	case 2:
		if err := s.slowCalls(machine.Fault{Function: state.SMI, GPU: -1, Delay: delay}); err != nil {
			return err
		}
		if wish := s.pickWithInterval(); wish != nil {
			return s.prepare(s.driver(), []*soakClaim{s.claimFor(wish)})
		}
	case 3:
		if err := s.slowCalls(machine.Fault{Function: "*", GPU: -1, Delay: delay / 4}); err != nil {
			return err
		}
	default:
		if err := s.slowCalls(machine.Fault{Function: "*", GPU: s.IntN(len(s.machine.GPUs)), Delay: delay}); err != nil {
			return err
		}
	}
	if s.chance(2) {
		return s.unprepareSome()
	}
	return s.prepareNew()
}

// pickWithInterval picks a claim for which nvidia-smi is run, or nothing.
func (s *soak) pickWithInterval() *harness.ClaimSpec {
	for range 30 {
		w := s.pick()
		if w != nil && (w.Config == harness.GPUWithShortSlice || slices.ContainsFunc(w.Devices, func(d harness.Device) bool {
			return d.Kind == harness.TimeSlice && d.Profile == ""
		})) {
			return w
		}
	}
	return nil
}

func (s *soak) slowCalls(f machine.Fault) error {
	f.Effect = machine.Proceed
	s.remember("slow %+v", f)
	fault, err := s.n.TryInject(f)
	if err != nil {
		return err
	}
	what := "slow call of NVML"
	if f.Function == state.SMI {
		what = "slow nvidia-smi"
	}
	s.addTrouble(func() error {
		struck, err := fault.TryRemove()
		s.done[what] += int(struck)
		return err
	})
	return nil
}

// slowProc holds those who read what /proc has of GPUs, and lets them go one after the other.
func (s *soak) slowProc(delay time.Duration) {
	s.remember("what /proc has of GPUs takes %s", delay)
	gate := harness.HoldFiles(s.t, filepath.Join(s.n.Root, "proc/driver/nvidia/gpus"))
	over, ended := make(chan struct{}), make(chan int)
	go func() {
		slow := 0
		defer func() { ended <- slow }()
		for tick := time.NewTicker(delay); ; {
			select {
			case <-over:
				tick.Stop()
				gate.Open()
				return
			case <-tick.C:
				if held := len(gate.Held()); held > 0 {
					gate.LetGo(s.t, 1)
					slow++
				}
			}
		}
	}()
	s.addTrouble(func() error {
		close(over)
		s.done["slow read of /proc"] += <-ended
		return nil
	})
}
