// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// soakUser is a program in a container of a claim.
type soakUser struct {
	*harness.Program
	claim *soakClaim
	// begun is the step in which it was started.
	begun int
	// excused: something has happened to its server.
	excused bool
}

// ensureSupervisor makes sure that a supervisor runs, unless it is away for a while.
func (s *soak) ensureSupervisor() error {
	if s.supervisor != nil {
		select {
		case <-s.supervisor.Exited:
		default:
			return nil
		}
		status, ok := s.supervisor.Cmd.ProcessState.Sys().(syscall.WaitStatus)
		if !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
			return fmt.Errorf("the supervisor ended with %v", s.supervisor.Cmd.ProcessState)
		}
		s.supervisor = nil
	}
	if s.away {
		return nil
	}
	return s.startSupervisor()
}

func (s *soak) startSupervisor() error {
	started, err := s.n.SpawnSupervisor()
	if err != nil {
		return err
	}
	s.done["supervisor started"]++
	s.supervisor = started
	s.keepLog(started.Log)
	return harness.Eventually(s.t.Context(), func() error {
		select {
		case <-started.Exited:
			return nil
		default:
		}
		_, err := s.n.TrySessions(s.t.Context())
		return err
	})
}

// wellMPS reports whether the supervisor and all sessions are well. A daemon may be
// dead although the supervisor has not found out yet.
func (s *soak) wellMPS() bool {
	all, err := s.n.TrySessions(s.t.Context())
	return err == nil && !slices.ContainsFunc(all, func(status harness.Session) bool {
		return status.Phase != harness.SessionRunning || !s.daemonLives(status.Spec.ID)
	})
}

// daemonLives reports whether the control daemon of a session is a live process.
func (s *soak) daemonLives(id string) bool {
	pid := readPID(filepath.Join(s.n.MPSDir, id, "pipe/daemon"))
	if pid == 0 {
		return false
	}
	// A process that nobody has waited for yet has no environment.
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && len(environment) > 0
}

// readPID reads the process ID of the control daemon with this pipe directory, or 0.
func readPID(pipe string) (pid int) {
	if data, err := os.ReadFile(filepath.Join(pipe, "nvidia-cuda-mps-control.pid")); err == nil {
		_, _ = fmt.Sscan(string(data), &pid)
	}
	return pid
}

// upset is for what happens to MPS: calls may fail until it is over, and programs on
// these GPUs may end. What has been struck may end a little later than the trouble.
func (s *soak) upset(concerned func(gpu int) bool, end func() error) {
	s.addTrouble(func() error {
		s.calmSince = s.steps
		return end()
	}).endsPrograms = concerned
	for _, u := range s.users {
		u.excused = u.excused || u.uses(concerned)
	}
}

// uses reports whether the program's claim has a device of such a GPU.
func (u *soakUser) uses(gpu func(int) bool) bool {
	return slices.ContainsFunc(u.claim.Devices, func(r harness.Device) bool { return gpu(r.GPU) })
}

// justUpset reports whether a program that starts now may end because of a trouble
// that goes on or has just ended.
func (s *soak) justUpset(u *soakUser) bool {
	const soon = 5 // steps
	return s.steps < s.calmSince+soon && s.calmSince > 0 || slices.ContainsFunc(s.troubles, func(t *trouble) bool {
		return t.endsPrograms != nil && u.uses(t.endsPrograms)
	})
}

func all(int) bool { return true }

// killSupervisor leaves the daemons alone. It may stay away for some time.
func (s *soak) killSupervisor() error {
	if s.supervisor == nil {
		return nil
	}
	s.supervisor.Kill()
	s.away = true
	s.upset(func(int) bool { return false }, func() error {
		s.away = false
		return s.ensureSupervisor()
	})
	return nil
}

// killSupervisorAtEffect kills it in the middle of something, or later.
func (s *soak) killSupervisorAtEffect() error {
	if s.supervisor == nil {
		return nil
	}
	doomed := s.supervisor
	doomed.Points.Arm(1 + s.IntN(60))
	s.upset(func(int) bool { return false }, func() error {
		_, _ = doomed.Points.Disarm()
		return nil
	})
	return nil
}

// stopSupervisor ends it as the kubelet does, and with it all daemons.
func (s *soak) stopSupervisor() error {
	if s.supervisor == nil || len(s.troubles) > 0 {
		return nil
	}
	s.upset(all, func() error { return nil })
	d := s.supervisor
	if err := d.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-d.Exited:
	case <-time.After(harness.Patience):
		return errors.New("a supervisor that was told to stop does not")
	}
	// One that is to be killed at an effect may be killed by this.
	if code := d.Cmd.ProcessState.ExitCode(); code > 0 {
		return fmt.Errorf("a supervisor that was told to stop ended with %d", code)
	}
	s.supervisor = nil
	return nil
}

// killMPS kills daemons and servers, as when their container ends.
func (s *soak) killMPS() error {
	if s.supervisor != nil {
		s.supervisor.Kill()
	}
	s.upset(all, func() error { return nil })
	return s.n.KillMPS()
}

// killServer kills a server, its daemon, or both.
func (s *soak) killServer() error {
	servers, err := s.servers()
	if err != nil || len(servers) == 0 {
		return err
	}
	p := servers[s.IntN(len(servers))]
	s.upset(func(gpu int) bool { return s.sharesServer(servers, p, gpu) }, func() error { return nil })
	if !s.chance(3) {
		_ = unix.Kill(p.PID, unix.SIGKILL)
	}
	if s.chance(2) {
		if daemon := readPID(p.Pipe); daemon > 0 {
			_ = unix.Kill(daemon, unix.SIGKILL)
		}
	}
	return nil
}

// faultServer is a fatal fault of a client.
func (s *soak) faultServer() error {
	servers, err := s.servers()
	if err != nil || len(servers) == 0 {
		return err
	}
	chosen := servers[s.IntN(len(servers))]
	s.upset(func(gpu int) bool { return s.sharesServer(servers, chosen, gpu) }, func() error { return nil })
	return s.n.State.Update(func(m *machine.Machine) error {
		for i := range m.Processes {
			p := &m.Processes[i]
			p.Fault = p.Fault || p.PID == chosen.PID && p.Kind == machine.MPSServer
		}
		return nil
	})
}

// servers are the processes of MPS servers, for each of their GPUs.
func (s *soak) servers() ([]machine.Process, error) {
	m, err := s.n.State.Snapshot()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(m.Processes, func(p machine.Process) bool { return p.Kind != machine.MPSServer }), nil
}

// sharesServer reports whether a server is on a GPU.
func (s *soak) sharesServer(servers []machine.Process, p machine.Process, gpu int) bool {
	return slices.ContainsFunc(servers, func(other machine.Process) bool { return other.PID == p.PID && other.GPU == gpu })
}

// useMPS starts a program in a container of a claim.
func (s *soak) useMPS() error {
	const enough = 4
	claims := s.some(1, func(c *soakClaim) bool { return c.held && len(c.Devices) > 0 && c.UsesMPS(c.Devices[0]) })
	if len(claims) == 0 || len(s.users) >= enough || !s.wellMPS() {
		return nil
	}
	c := claims[0]
	ctx, cancel := context.WithTimeout(s.t.Context(), harness.Patience)
	defer cancel()
	// The smallest share has 1 GiB, and a context of its client is part of it.
	u, err := s.n.TryStartProgram(ctx, s.t, s.n.Container(s.t, c.ids[0]), "--memory=256Mi", "--timeout=60s")
	started := &soakUser{Program: u, claim: c, begun: s.steps}
	started.excused = s.justUpset(started)
	switch {
	case err == nil:
		s.done["program"]++
		s.users = append(s.users, started)
		return nil
	case len(s.troubles) > 0 || started.excused:
		return nil
	}
	return fmt.Errorf("a program of claim %s: %w", c, err)
}

// endUsers ends the programs of claims, as the kubelet does before it releases
// them.
func (s *soak) endUsers(which func(*soakClaim) bool) {
	s.users = slices.DeleteFunc(s.users, func(u *soakUser) bool {
		if which(u.claim) {
			u.Kill()
			return true
		}
		return false
	})
}

// checkUsers fails if a program has ended without a reason.
func (s *soak) checkUsers() error {
	var errs []error
	s.users = slices.DeleteFunc(s.users, func(u *soakUser) bool {
		err := u.Check()
		if err == nil {
			return false
		}
		if !u.excused {
			errs = append(errs, fmt.Errorf("a program of claim %s that was started %d steps ago: %w", u.claim, s.steps-u.begun, err))
		}
		u.Kill()
		return true
	})
	return errors.Join(errs...)
}

// closeMPS ends everything of MPS.
func (s *soak) closeMPS() {
	s.endUsers(func(*soakClaim) bool { return true })
	if s.supervisor != nil {
		s.supervisor.Kill()
		s.supervisor = nil
	}
}

// sessions are the MPS sessions that a claim needs.
func (s *soak) sessions(c *soakClaim) []string {
	var ids []string
	for i, name := range s.n.DeviceNames(s.t, c.Devices) {
		// One for all GPUs of a claim, one for each partition.
		if d := c.Devices[i]; c.UsesMPS(d) && (c.Config != harness.GPUWithMPS || i == 0) {
			ids = append(ids, harness.BaseDeviceName(name))
		}
	}
	return ids
}

// checkSessions fails unless the sessions are those of the claims that are held,
// and the mounts are those of the sessions.
func (s *soak) checkSessions() error {
	var want, wantMounts []string
	for _, c := range s.claims {
		want = append(want, s.sessions(c)...)
	}
	slices.Sort(want)
	want = slices.Compact(want)
	for _, id := range want {
		for _, mount := range []string{"log", "memory", "pipe"} {
			wantMounts = append(wantMounts, filepath.Join(s.n.MPSDir, id, mount))
		}
	}
	slices.Sort(wantMounts)
	all, err := s.n.TrySessions(s.t.Context())
	if err != nil {
		return err
	}
	var got []string
	for _, status := range all {
		got = append(got, status.Spec.ID)
	}
	mounts, err := s.n.MPSMounts()
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) || !slices.Equal(mounts, wantMounts) {
		return fmt.Errorf("the MPS sessions are %v, the mounts %v, the claims need %v", got, mounts, want)
	}
	return nil
}
