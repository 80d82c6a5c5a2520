// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/must"
)

// TestSupervisorCrash kills the MPS supervisor before every effect that preparing
// and unpreparing have there, and after the last, while the driver waits for it.
// The daemons of the claims beside must live on, and be known to the next
// supervisor.
func TestSupervisorCrash(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "crashes", 64)
	for _, layout := range []string{"second MPS share", "MPS share of a partition"} {
		t.Run(layout, func(t *testing.T) {
			t.Parallel()
			s := &supervisorNode{crashNode: newCrashNode(t, crashSharing[layout])}
			s.supervisor.Kill()
			s.renew(t)
			for _, operation := range crashOperations {
				passed := t.Run(operation.name, func(t *testing.T) {
					s.operation = operation
					s.killEverywhere(t, count)
				})
				if !passed {
					return // what is left disturbs the other operation
				}
			}
		})
	}
}

// supervisorNode is a crashNode in which the supervisor dies. The driver goes on, and
// cleans up all the time.
type supervisorNode struct {
	*crashNode

	p *harness.Driver
}

// renew runs the node's next supervisor.
func (s *supervisorNode) renew(t *testing.T) {
	t.Helper()
	s.supervisor = s.n.StartKillableSupervisor(s.t)
}

// driver is the one that runs, or a new one.
func (s *supervisorNode) driver(t *testing.T) *harness.Driver {
	t.Helper()
	if s.p == nil {
		s.p = s.start(s.t, []string{"--poll-interval=50ms"})
		s.settle(t, s.p)
	}
	return s.p
}

// supervisorWays are how it goes on. The supervisor has been killed, or has done all
// that it was to do; call is what comes of the driver's call.
var supervisorWays = []struct {
	name string
	run  func(t *testing.T, s *supervisorNode, call <-chan error)
}{
	// The container runtime starts it again. The call may succeed, or say why not.
	{"comes back", func(t *testing.T, s *supervisorNode, call <-chan error) {
		s.supervisor.Kill()
		s.renew(t)
		err := <-call
		if s.operation.prepared {
			expect.Do(t, err, "unprepare")
		} else {
			s.prepareAgain(t)
			s.p.MustUnprepare(t, s.claims...)
		}
		s.untilWithout(t, s.p)
	}},
	// Pods can end meanwhile.
	{"stays away", func(t *testing.T, s *supervisorNode, call <-chan error) {
		s.supervisor.Kill()
		err := <-call
		if s.operation.prepared && err != nil {
			t.Errorf("unprepare: %v", err)
		}
		s.p.MustUnprepare(t, s.claims...)
		s.renew(t)
		s.untilWithout(t, s.p)
	}},
	// As in a crash of the node's container runtime.
	{"driver killed, too", func(t *testing.T, s *supervisorNode, call <-chan error) {
		s.supervisor.Kill()
		s.p.Kill()
		t.Logf("the call: %v", <-call)
		s.p = nil
		s.renew(t)
		s.driver(t)
		s.prepareAgain(t)
		s.p.MustUnprepare(t, s.claims...)
		s.untilWithout(t, s.p)
	}},
	{"driver killed alone", func(t *testing.T, s *supervisorNode, call <-chan error) {
		s.p.Kill()
		t.Logf("the call: %v", <-call)
		s.p = nil
		s.supervisor.Kill()
		s.renew(t)
		p := s.driver(t)
		p.MustUnprepare(t, s.claims...)
		s.untilWithout(t, p)
	}},
}

// prepareAgain has the kubelet repeat the call until it succeeds, and checks what
// containers get. The driver does not notice a new supervisor at once.
func (s *supervisorNode) prepareAgain(t *testing.T) {
	t.Helper()
	for _, c := range s.claims {
		s.p.Until(t, "a prepared claim", func(ctx context.Context) error {
			_, err := s.p.TryPrepare(ctx, c, harness.KubeletTimeout)
			return err
		})
	}
	s.prepareAll(t, s.p)
}

// killEverywhere kills before effect 1, 2 and so on until there is no such effect.
func (s *supervisorNode) killEverywhere(t *testing.T, count *harness.Enumeration) {
	effects := s.effects(t)
	for i, e := range effects {
		t.Logf("effect %d: %s", i+1, s.shorten(e))
	}
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		if !count.Find(n) {
			continue
		}
		for i, way := range supervisorWays {
			if !*crashAll && harness.TheSample().Way(n, len(supervisorWays)) != i {
				continue
			}
			passed := t.Run("before "+strconv.Itoa(n)+"/"+way.name, func(t *testing.T) {
				call := s.crash(t, n)
				done, killed := s.supervisor.Points.Disarm()
				if killed {
					more = true
					t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
				}
				way.run(t, s, call)
				s.besideWorks(t)
				count.Ran("supervisor in " + s.operation.name + ", then " + way.name)
			})
			if !passed {
				return // what is left disturbs all others
			}
		}
	}
}

// effects are those of the whole operation.
func (s *supervisorNode) effects(t *testing.T) []killpoint.Effect {
	t.Helper()
	call := s.crash(t, 0)
	must.Do(t, <-call)
	effects, _ := s.supervisor.Points.Disarm()
	s.p.MustUnprepare(t, s.claims...)
	s.untilWithout(t, s.p)
	return effects
}

// crash runs the operation with new claims until the supervisor is killed before
// its effect n, or until it is done.
func (s *supervisorNode) crash(t *testing.T, n int) (call chan error) {
	t.Helper()
	p := s.driver(t)
	s.allocate(t)
	if s.operation.prepared {
		s.prepareAgain(t)
	}
	s.supervisor.Points.Arm(n)
	ctx, cancel := context.WithTimeout(t.Context(), harness.KubeletTimeout)
	call = make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer cancel()
		call <- s.operation.call(ctx, p, s.claims)
		close(done)
	}()
	select {
	case <-s.supervisor.Exited:
		if !s.operation.prepared { // a release never waits for a supervisor; a Prepare is not to wait for one that never comes back
			time.AfterFunc(5*harness.ShortTimeout, cancel)
		}
	case <-done:
	}
	return call
}

// besideWorks fails if a program of the claims beside noticed anything.
func (s *crashNode) besideWorks(t *testing.T) {
	t.Helper()
	for i, u := range s.users {
		expect.Do(t, u.Check(), "the program of claim", i, "beside")
	}
}
