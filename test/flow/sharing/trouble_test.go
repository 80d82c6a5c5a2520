// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// mpsNode has a claim with an MPS share and a program on each of two GPUs. What goes wrong
// is on the first.
type mpsNode struct {
	n          *harness.Node
	p          *harness.Driver
	supervisor *harness.Supervisor
	claims     [2]*drapb.Claim
	ids        [2][]string
	users      [2]*harness.Program
	// server is that of the second GPU.
	server []int
	before harness.Snapshot
}

func newMPSNode(t *testing.T, flags ...string) *mpsNode {
	t.Helper()
	s := &mpsNode{n: harness.NewNode(t, "h100x2")}
	s.supervisor = s.n.StartSupervisor(t)
	s.before = s.n.Snapshot(t)
	s.p = s.n.Run(t, flags...)
	for gpu := range s.claims {
		s.claims[gpu] = s.n.Allocate(t, []harness.Device{{GPU: gpu, Kind: harness.MPS}})
		s.ids[gpu] = s.p.MustPrepare(t, s.claims[gpu])
	}
	s.users[0] = s.stubborn(t, 0)
	s.users[1] = s.n.StartProgram(t, s.ids[1]...)
	s.server = s.n.Servers(t, 1)
	return s
}

// stubborn starts a program that does not end when it loses its server, which delays the
// recovery for as long as a program can.
func (s *mpsNode) stubborn(t *testing.T, gpu int) *harness.Program {
	t.Helper()
	return must.Get(s.n.TryStartProgram(t.Context(), t, s.n.Container(t, s.ids[gpu]...), "--stay"))(t)
}

// lost waits until the program on the first GPU has lost its server.
func (s *mpsNode) lost(t *testing.T) {
	t.Helper()
	s.p.UntilTrue(t, "the program to lose its server", func() bool { return s.users[0].Check() != nil })
}

// neighbourWorks fails if anything happened to the second GPU.
func (s *mpsNode) neighbourWorks(t *testing.T) {
	t.Helper()
	expect.Do(t, s.users[1].Check(), "the program on the other GPU")
	expect.Same(t, s.n.Servers(t, 1), s.server, "the other GPU's server")
}

// release ends everything and checks that nothing is left.
func (s *mpsNode) release(t *testing.T) {
	t.Helper()
	for _, u := range s.users {
		u.Kill()
	}
	s.p.MustUnprepare(t, s.claims[:]...)
	// The driver looks at claims all the time, with their locks.
	s.p.Until(t, "nothing to be left", func(context.Context) error { return harness.AsError(s.before.Diff(s.n.Snapshot(t))) })
}

// pipe is the path of a file of the control daemon of a GPU's session.
func (s *mpsNode) pipe(t *testing.T, gpu int, name string) string {
	t.Helper()
	return filepath.Join(s.n.MPSDir, s.n.DeviceName(t, gpu, "", 0), "pipe/daemon", name)
}

// daemon is the process ID of the control daemon of a GPU's session.
func (s *mpsNode) daemon(t *testing.T, gpu int) int {
	t.Helper()
	path := s.pipe(t, gpu, "nvidia-cuda-mps-control.pid")
	data := must.Get(os.ReadFile(path))(t)
	return must.Get(strconv.Atoi(strings.TrimSpace(string(data))))(t)
}

func killed(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		must.Do(t, unix.Kill(pid, unix.SIGKILL), "kill", pid)
	}
}

// unnoticed does something while the supervisor stands still. For that, one thing after the other
// has happened at once.
func (s *mpsNode) unnoticed(t *testing.T, do func()) {
	t.Helper()
	supervisor := s.supervisor.Cmd.Process
	must.Do(t, supervisor.Signal(unix.SIGSTOP))
	s.supervisor.Until(t, "the supervisor to stand still", func(context.Context) error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", supervisor.Pid))
		for _, thread := range threads {
			// One that has ended does nothing either.
			if stat, err := os.ReadFile(thread); err == nil && !strings.Contains(string(stat), ") T ") {
				return fmt.Errorf("it runs: %s", stat)
			}
		}
		return err
	})
	do()
	must.Do(t, supervisor.Signal(unix.SIGCONT))
}

// mpsTroubles are what can happen to the first GPU's clients.
var mpsTroubles = map[string]func(t *testing.T, s *mpsNode){
	"daemon killed": func(t *testing.T, s *mpsNode) { killed(t, s.daemon(t, 0)) },
	"server killed": func(t *testing.T, s *mpsNode) { killed(t, s.n.Servers(t, 0)...) },
	"both killed": func(t *testing.T, s *mpsNode) {
		pids := append(s.n.Servers(t, 0), s.daemon(t, 0))
		s.unnoticed(t, func() { killed(t, pids...) })
	},
	"fault": func(t *testing.T, s *mpsNode) {
		s.n.Update(t, func(m *machine.Machine) {
			for i := range m.Processes {
				p := &m.Processes[i]
				p.Fault = p.Fault || p.GPU == 0 && p.Kind == machine.MPSServer
			}
		})
	},
	// What it answers is never asked for, and no container starts on it.
	"socket replaced": func(t *testing.T, s *mpsNode) {
		path := s.pipe(t, 0, "control")
		listener := must.Get(net.Listen("unixpacket", path+".mine"))(t)
		t.Cleanup(func() { _ = listener.Close() })
		must.Do(t, os.Rename(path+".mine", path))
	},
	"supervisor and daemon killed": func(t *testing.T, s *mpsNode) {
		s.supervisor.Kill()
		killed(t, s.daemon(t, 0))
		s.supervisor = s.n.StartSupervisor(t)
	},
	"supervisor killed, then the server": func(t *testing.T, s *mpsNode) {
		s.supervisor.Kill()
		killed(t, s.n.Servers(t, 0)...)
		s.supervisor = s.n.StartSupervisor(t)
	},
}

// TestMPSTrouble checks that the claims that lose their server get an event, that the device
// is tainted until it has recovered, and that the other GPU is not affected.
func TestMPSTrouble(t *testing.T) {
	t.Parallel()
	for name, trouble := range mpsTroubles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSNode(t, harness.Frequent...)
			trouble(t, s)
			s.lost(t)
			s.p.UntilEvent(t, s.n, "MPSServerLost", s.n.DeviceName(t, 0, "", 0))
			for _, e := range s.n.Events(t) {
				if e.Reason == "MPSServerLost" && e.InvolvedObject.Name != s.claims[0].GetName() {
					t.Errorf("an event is about %s %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Message)
				}
			}
			s.users[0].Kill()
			s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[0]))
			s.p.UntilTainted(t, s.n, "mps-unhealthy", nil)
			s.n.WantMode(t, 0, harness.ExclusiveProcess)
			if got := s.n.Sessions(t)[s.n.DeviceName(t, 0, "", 0)]; got.Losses != 1 {
				t.Errorf("%d losses, want one: %+v", got.Losses, got)
			}
			s.neighbourWorks(t)
			s.release(t)
		})
	}
}

// TestMPSFaultTaint checks that the GPU gets no more claims as long as MPS takes no clients,
// because of a program that a fault has hit and that does not end.
func TestMPSFaultTaint(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t, harness.Frequent...)
	mpsTroubles["fault"](t, s)
	s.p.UntilTainted(t, s.n, "mps-unhealthy", s.n.DevicesOf(t, 0))
	another := s.n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}})
	if _, err := s.p.TryPrepare(t.Context(), another, harness.ShortTimeout); err == nil {
		t.Error("a share was prepared whose server takes no programs")
	}
	s.p.MustUnprepare(t, another)
	s.neighbourWorks(t)
	s.users[0].Kill()
	s.p.UntilTainted(t, s.n, "mps-unhealthy", nil)
	s.p.MustPrepare(t, another)
	s.p.MustUnprepare(t, another)
	s.release(t)
}

// TestMPSDoesNotComeBack checks that devices stay tainted as long as their daemon cannot be
// started again, and that their claims can end.
func TestMPSDoesNotComeBack(t *testing.T) {
	t.Parallel()
	for name, comesBack := range map[string]bool{"comes back": true, "released meanwhile": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSNode(t, harness.Frequent...)
			fault := s.n.Inject(t, machine.Fault{Function: "mps_control_start", GPU: 0, Effect: machine.Fail})
			killed(t, s.daemon(t, 0))
			s.p.UntilTainted(t, s.n, "mps-unhealthy", s.n.DevicesOf(t, 0))
			s.n.WantMode(t, 0, harness.ExclusiveProcess)
			s.neighbourWorks(t)
			s.users[0].Kill()
			if comesBack {
				fault.Remove(t)
				s.p.UntilTainted(t, s.n, "mps-unhealthy", nil)
				s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[0]))
			} else {
				s.p.MustUnprepare(t, s.claims[0])
				s.p.Until(t, "the default compute mode", func(context.Context) error {
					if mode := s.n.Machine(t).GPUs[0].ComputeMode; mode != harness.DefaultMode {
						return fmt.Errorf("it is %d", mode)
					}
					return nil
				})
				s.p.UntilTainted(t, s.n, "mps-unhealthy", nil)
				fault.Remove(t)
			}
			s.release(t)
		})
	}
}
