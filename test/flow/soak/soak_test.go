// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

var (
	soakDuration = flag.Duration("soak.duration", 0, "how long TestSoak runs; 0: for a fixed number of steps from a fixed seed")
	soakSeed     = flag.Uint64("soak.seed", 0, "seed of TestSoak; 0: a new one with -soak.duration, the fixed one without")
)

var soakMachines = []struct {
	name, machine string
	change        func(*machine.Machine)
}{
	{"8 H100", "dgx-h100", nil},
	{"2 A100 with MIG mode on", "a100-80x2", harness.TurnMIGOn},
	{"2 L4", "l4x2", nil},
	{"2 RTX PRO 6000", "rtx-pro-6000x2", nil},
}

// TestSoak does what can happen to a node, in random order, to several machines
// at once: claims come and go, also such as cannot be, the driver and MPS are
// killed, stopped and upgraded, the hardware fails, hangs and is slow, nodes reboot, claims
// are deleted behind the kubelet's back. After each step it compares the hardware,
// the journal and the CDI specs with what the kubelet was told. In the end,
// without troubles, all three are the same, and then nothing is left.
//
// Without flags it takes the same number of steps from the same seed every time.
// The seed decides what is done, but not how what runs at the same time
// interleaves, nor how long anything takes.
func TestSoak(t *testing.T) {
	t.Parallel()
	seed := *soakSeed
	switch {
	case seed != 0:
	case *soakDuration > 0:
		seed = uint64(time.Now().UnixNano())
	default:
		seed = soakFixedSeed
	}
	var wg sync.WaitGroup
	for i, m := range soakMachines {
		wg.Go(func() {
			t.Run(m.name, func(t *testing.T) {
				t.Logf("-soak.seed=%d -soak.duration=%v", seed, *soakDuration)
				change := m.change
				if change == nil {
					change = func(*machine.Machine) {}
				}
				s := newSoak(t, harness.NewNode(t, m.machine, change), seed+uint64(i)<<32)
				expect.Do(t, s.run(t, *soakDuration))
				s.checkCounts(t)
			})
		})
	}
	wg.Wait()
}

// soak is one machine and what is known of it.
type soak struct {
	t *testing.T
	n *harness.Node
	// Rand is seeded again for every step, so that what a step finds by chance
	// does not decide which steps come after it.
	*rand.Rand
	seed  uint64
	steps int
	// machine is as it was made, pristine what claims had left then.
	machine  *machine.Machine
	pristine harness.Snapshot

	// drivers run at the moment, the newest last. One that has ended stays in
	// it until the next step.
	drivers  []*soakDriver
	claims   []*soakClaim
	troubles []*trouble
	// supervisor of MPS; nil, or away, while there is none.
	supervisor *harness.Supervisor
	away       bool
	users      []*soakUser
	// calmSince is the step in which the last trouble of MPS ended.
	calmSince int
	// ending: nothing goes wrong any more.
	ending bool

	done map[string]int
	// history are the last steps, and logs those of the last drivers.
	history []string
	logs    []*harness.LogBuffer
}

func newSoak(t *testing.T, n *harness.Node, seed uint64) *soak {
	harness.SkipWithoutMounts(t)
	return &soak{t: t, n: n, Rand: rand.New(rand.NewPCG(seed, 0)), seed: seed, machine: n.Machine(t), pristine: n.Snapshot(t), done: map[string]int{}}
}

// soakAction is something that can happen. It reports only what must not be.
type soakAction struct {
	name   string
	weight int
	run    func(*soak) error
}

var soakActions = []soakAction{
	{"prepare", 60, (*soak).prepareNew},
	{"prepare again", 20, (*soak).prepareAgain},
	{"unprepare", 45, (*soak).unprepareSome},
	{"delete claim", 3, (*soak).deleteClaim},
	{"replace claim", 3, (*soak).replaceClaim},
	{"kill", 2, (*soak).killDriver},
	{"kill during a call", 4, (*soak).killSoon},
	{"kill at an effect", 6, (*soak).killAtEffect},
	{"stop", 2, (*soak).stopDriver},
	{"upgrade", 2, (*soak).addDriver},
	{"fault", 10, (*soak).addFault},
	{"hang", 2, (*soak).addHang},
	{"slow", 8, (*soak).addSlow},
	{"broken GPU", 2, (*soak).breakGPU},
	{"reboot", 1, (*soak).reboot},
	{"program", 12, (*soak).useMPS},
	{"kill supervisor", 2, (*soak).killSupervisor},
	{"kill supervisor at an effect", 3, (*soak).killSupervisorAtEffect},
	{"stop supervisor", 1, (*soak).stopSupervisor},
	{"kill MPS", 1, (*soak).killMPS},
	{"kill server", 2, (*soak).killServer},
	{"fault of a client", 2, (*soak).faultServer},
}

// Without a duration, TestSoak takes soakSteps steps on each machine.
const (
	soakFixedSeed = 1
	soakSteps     = 150
)

// run goes on for about d, or for soakSteps steps if that is 0.
func (s *soak) run(t *testing.T, d time.Duration) (err error) {
	defer func() {
		s.closeDrivers()
		s.closeMPS()
		t.Log(s.report())
		if err != nil {
			err = fmt.Errorf("%w\nlast steps:\n%s", err, strings.Join(s.history, "\n"))
			for _, log := range s.logs {
				t.Logf("log of a driver:\n%s", log)
			}
		}
	}()
	weights := 0
	for _, a := range soakActions {
		weights += a.weight
	}
	for end := time.Now().Add(d); s.steps < soakSteps || time.Now().Before(end); {
		s.steps++
		s.Rand = rand.New(rand.NewPCG(s.seed, uint64(s.steps)))
		err := s.step(s.IntN(weights))
		if errors.Is(err, killpoint.ErrForbidden) {
			t.Skip(err)
		}
		if err != nil {
			return err
		}
	}
	return s.finish()
}

// step does one thing and looks at what came of it.
func (s *soak) step(choice int) error {
	if err := errors.Join(s.endTroubles(false), s.ensureSupervisor(), s.ensureDriver()); err != nil {
		return err
	}
	for _, a := range soakActions {
		if choice -= a.weight; choice < 0 {
			s.count(a.name)
			if err := a.run(s); err != nil {
				return fmt.Errorf("%s: %w", a.name, err)
			}
			break
		}
	}
	return errors.Join(s.check(), s.checkUsers())
}

// checkCounts fails if the walk did too little to say anything.
func (s *soak) checkCounts(t *testing.T) {
	if t.Failed() || t.Skipped() {
		return
	}
	s.done["slow call"] = s.done["slow call of NVML"] + s.done["slow nvidia-smi"] + s.done["slow read of /proc"]
	// How many calls succeed depends on how fast the machine is.
	for what, least := range map[string]int{
		"prepare": soakSteps / 8, "unprepare": soakSteps / 15, "fault": soakSteps / 50, "slow": soakSteps / 75, "slow call": 5, "driver started": soakSteps / 30,
		"supervisor started": 2, "granted": 1,
	} {
		if s.done[what] < least {
			t.Errorf("%d %s, want at least %d", s.done[what], what, least)
		}
	}
}

// count remembers that something happened.
func (s *soak) count(what string) {
	s.done[what]++
	s.remember("%s", what)
}

// remember keeps the last steps for the message of a failure.
func (s *soak) remember(format string, arguments ...any) {
	const enough = 60
	s.history = append(s.history, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, arguments...))
	if len(s.history) > enough {
		s.history = s.history[1:]
	}
}

func (s *soak) report() string {
	var lines []string
	for what, n := range s.done {
		lines = append(lines, fmt.Sprintf("%d %s", n, what))
	}
	slices.SortFunc(lines, func(a, b string) int {
		_, a, _ = strings.Cut(a, " ")
		_, b, _ = strings.Cut(b, " ")
		return strings.Compare(a, b)
	})
	return strings.Join(lines, ", ")
}

// chance is true in one of n cases.
func (s *soak) chance(n int) bool { return s.IntN(n) == 0 }

func TestMain(m *testing.M) { harness.Main(m) }
