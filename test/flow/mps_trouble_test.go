// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// mpsScene has a claim with an MPS share, and so its program, on each of two GPUs.
// What goes wrong is on the first.
type mpsScene struct {
	n          *node
	p          *process
	supervisor *supervisor
	claims     [2]*drapb.Claim
	ids        [2][]string
	users      [2]*user
	// server is that of the second GPU.
	server []int
	before traces
}

func newMPSScene(t *testing.T, flags ...string) *mpsScene {
	t.Helper()
	s := &mpsScene{n: newNode(t, "h100x2")}
	s.supervisor = s.n.startSupervisor(t)
	s.before = s.n.traces(t)
	s.p = s.n.start(t, flags...)
	s.p.ready(t)
	for gpu := range s.claims {
		s.claims[gpu] = s.n.claim(t, []request{{gpu: gpu, kind: asMPS}})
		s.ids[gpu] = s.p.mustPrepare(t, s.claims[gpu])
	}
	s.users[0] = s.stubborn(t, 0)
	s.users[1] = s.n.use(t, s.ids[1]...)
	s.server = s.n.servers(t, 1)
	return s
}

// stubborn is a program that does not end when it loses its server, so that it is
// in the way as long as a program can be.
func (s *mpsScene) stubborn(t *testing.T, gpu int) *user {
	t.Helper()
	u, err := s.n.tryUse(t.Context(), t, s.n.container(t, s.ids[gpu]...), "--stay")
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// lost waits until the program on the first GPU has lost its server.
func (s *mpsScene) lost(t *testing.T) {
	t.Helper()
	s.p.until(t, "the program to lose its server", func(context.Context) error {
		if s.users[0].works() == nil {
			return errors.New("it works")
		}
		return nil
	})
}

// neighbourWorks fails if anything happened to the second GPU.
func (s *mpsScene) neighbourWorks(t *testing.T) {
	t.Helper()
	if err := s.users[1].works(); err != nil {
		t.Errorf("the program on the other GPU: %v", err)
	}
	if now := s.n.servers(t, 1); !slices.Equal(now, s.server) {
		t.Errorf("the other GPU's server was %v and is %v", s.server, now)
	}
}

// release ends all and looks for what is left.
func (s *mpsScene) release(t *testing.T) {
	t.Helper()
	for _, u := range s.users {
		u.end()
	}
	s.p.mustUnprepare(t, s.claims[:]...)
	// The driver looks at claims all the time, with their locks.
	s.p.until(t, "nothing to be left", func(context.Context) error { return asError(s.before.diff(s.n.traces(t))) })
}

// daemon is the process ID of the control daemon of a GPU's session.
func (s *mpsScene) daemon(t *testing.T, gpu int) int {
	t.Helper()
	path := filepath.Join(s.n.mps, s.n.device(t, gpu, "", 0), "pipe/nvidia-cuda-mps-control.pid")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func killed(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatalf("kill %d: %v", pid, err)
		}
	}
}

// mpsTroubles are what can happen to the first GPU's clients.
var mpsTroubles = map[string]func(t *testing.T, s *mpsScene){
	"daemon killed": func(t *testing.T, s *mpsScene) { killed(t, s.daemon(t, 0)) },
	"server killed": func(t *testing.T, s *mpsScene) { killed(t, s.n.servers(t, 0)...) },
	"both killed": func(t *testing.T, s *mpsScene) {
		killed(t, append(s.n.servers(t, 0), s.daemon(t, 0))...)
	},
	"fault": func(t *testing.T, s *mpsScene) {
		s.n.update(t, func(m *machine.Machine) {
			for i := range m.Processes {
				p := &m.Processes[i]
				p.Fault = p.Fault || p.GPU == 0 && p.Kind == machine.MPSServer
			}
		})
	},
	"supervisor and daemon killed": func(t *testing.T, s *mpsScene) {
		s.supervisor.kill()
		killed(t, s.daemon(t, 0))
		s.supervisor = s.n.startSupervisor(t)
	},
	"supervisor killed, then the server": func(t *testing.T, s *mpsScene) {
		s.supervisor.kill()
		killed(t, s.n.servers(t, 0)...)
		s.supervisor = s.n.startSupervisor(t)
	},
}

// TestMPSTrouble: who loses a server is told, the device is not given to others
// before it is well, and the other GPU has no part in it.
func TestMPSTrouble(t *testing.T) {
	t.Parallel()
	for name, trouble := range mpsTroubles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSScene(t, frequent...)
			trouble(t, s)
			s.lost(t)
			s.p.untilEvent(t, s.n, "MPSServerLost", s.n.device(t, 0, "", 0))
			for _, e := range s.n.events(t) {
				if e.Reason == "MPSServerLost" && e.InvolvedObject.Name != s.claims[0].GetName() {
					t.Errorf("an event is about %s %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Message)
				}
			}
			s.users[0].end()
			s.p.until(t, "a new program", s.n.containerStarts(t, s.ids[0]))
			s.p.untilTainted(t, s.n, "mps-unhealthy", nil)
			s.n.wantMode(t, 0, exclusiveProcess)
			if got := s.n.sessions(t)[s.n.device(t, 0, "", 0)]; got.Losses != 1 {
				t.Errorf("%d losses, want one: %+v", got.Losses, got)
			}
			s.neighbourWorks(t)
			s.release(t)
		})
	}
}

// TestMPSFaultTaint: as long as a program that a fault hit stays, MPS takes no
// others, and the GPU gets no more claims.
func TestMPSFaultTaint(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, frequent...)
	mpsTroubles["fault"](t, s)
	s.p.untilTainted(t, s.n, "mps-unhealthy", s.n.devicesOf(t, 0))
	another := s.n.claim(t, []request{{gpu: 0, kind: asMPS}})
	if _, err := s.p.tryPrepare(t.Context(), another, hurry); err == nil {
		t.Error("a share was prepared whose server takes no programs")
	}
	s.p.mustUnprepare(t, another)
	s.neighbourWorks(t)
	s.users[0].end()
	s.p.untilTainted(t, s.n, "mps-unhealthy", nil)
	s.p.mustPrepare(t, another)
	s.p.mustUnprepare(t, another)
	s.release(t)
}

// TestMPSDoesNotComeBack: a daemon that cannot be started again keeps its devices
// tainted. Its claims can end, and it comes back when it can.
func TestMPSDoesNotComeBack(t *testing.T) {
	t.Parallel()
	for name, comesBack := range map[string]bool{"comes back": true, "released meanwhile": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSScene(t, frequent...)
			fault := s.n.inject(t, machine.Fault{Function: "mps_control_start", GPU: 0, Effect: machine.Fail})
			killed(t, s.daemon(t, 0))
			s.p.untilTainted(t, s.n, "mps-unhealthy", s.n.devicesOf(t, 0))
			s.n.wantMode(t, 0, exclusiveProcess)
			s.neighbourWorks(t)
			s.users[0].end()
			if comesBack {
				fault.remove(t)
				s.p.untilTainted(t, s.n, "mps-unhealthy", nil)
				s.p.until(t, "a new program", s.n.containerStarts(t, s.ids[0]))
			} else {
				s.p.mustUnprepare(t, s.claims[0])
				s.p.until(t, "the default compute mode", func(context.Context) error {
					if mode := s.n.machine(t).GPUs[0].ComputeMode; mode != defaultMode {
						return fmt.Errorf("it is %d", mode)
					}
					return nil
				})
				s.p.untilTainted(t, s.n, "mps-unhealthy", nil)
				fault.remove(t)
			}
			s.release(t)
		})
	}
}
