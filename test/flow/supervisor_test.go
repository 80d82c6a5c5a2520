// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/flow/killpoint"
)

// supervisor is a running MPS supervisor.
type supervisor struct {
	*process
	// points are there if it can be killed at an effect.
	points *killpoint.Supervisor
}

// startSupervisor runs the MPS supervisor of the node until the test ends. It
// returns when the driver could call it.
func (n *node) startSupervisor(t testing.TB, flags ...string) *supervisor {
	t.Helper()
	skipWithoutMounts(t)
	s := &supervisor{process: n.supervisorProcess(flags)}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.reap()
	s.tie(t)
	s.serving(t, n)
	return s
}

// spawnSupervisor starts a supervisor that can be killed at an effect, and does
// not wait for anything.
func (n *node) spawnSupervisor(flags ...string) (*supervisor, error) {
	s := &supervisor{process: n.supervisorProcess(flags)}
	var err error
	if s.points, err = killpoint.Start(s.cmd); err != nil {
		return nil, fmt.Errorf("start the supervisor: %w\n%s", err, s.log)
	}
	s.reap()
	return s, nil
}

// startKillable is startSupervisor for one that can be killed at an
// effect.
func (n *node) startKillable(t testing.TB, flags ...string) *supervisor {
	t.Helper()
	skipWithoutMounts(t)
	s, err := n.spawnSupervisor(flags...)
	if errors.Is(err, killpoint.ErrForbidden) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.tie(t)
	s.serving(t, n)
	return s
}

func (n *node) supervisorProcess(flags []string) *process {
	p := &process{log: &logBuffer{}, exited: make(chan struct{})}
	p.cmd = exec.Command(built.supervisor, append([]string{
		"--mps-dir=" + n.mps, "--driver-root=" + n.root,
		"--health-port=0", "--check-interval=50ms", "-v=4",
	}, flags...)...)
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	return p
}

// reap waits for the end of a supervisor that was started.
func (s *supervisor) reap() {
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
}

// tie ends the supervisor with the test.
func (s *supervisor) tie(t testing.TB) {
	t.Cleanup(func() {
		s.kill()
		if t.Failed() {
			t.Logf("log of the supervisor:\n%s", s.log)
		}
	})
}

// serving waits until somebody listens.
func (s *supervisor) serving(t testing.TB, n *node) {
	t.Helper()
	s.until(t, "the supervisor's socket", func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(n.mps, mps.SocketName))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// mounts tells whether this machine lets tests mount: a supervisor does.
var mounts = sync.OnceValue(func() error {
	dir, err := os.MkdirTemp("", "f")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(dir) }()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	return unix.Unmount(dir, 0)
})

func skipWithoutMounts(t testing.TB) {
	t.Helper()
	if err := mounts(); errors.Is(err, unix.EPERM) {
		t.Skipf("the MPS supervisor mounts: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
}
