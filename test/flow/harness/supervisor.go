// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

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

	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/must"
)

// Supervisor is a running MPS supervisor.
type Supervisor struct {
	*Process
	// Points are there if it can be killed at an effect.
	Points *killpoint.Supervisor
}

// StartSupervisor runs the MPS supervisor of the node until the test ends. It returns
// when the supervisor can be called.
func (n *Node) StartSupervisor(t testing.TB, flags ...string) *Supervisor {
	t.Helper()
	SkipWithoutMounts(t)
	s := &Supervisor{Process: n.supervisorProcess(flags)}
	must.Do(t, s.Cmd.Start())
	s.reap()
	s.tie(t)
	s.serving(t, n)
	return s
}

// SpawnSupervisor starts a supervisor that can be killed at an effect, and does
// not wait for anything.
func (n *Node) SpawnSupervisor(flags ...string) (*Supervisor, error) {
	s := &Supervisor{Process: n.supervisorProcess(flags)}
	var err error
	if s.Points, err = killpoint.Start(s.Cmd); err != nil {
		return nil, fmt.Errorf("start the supervisor: %w\n%s", err, s.Log)
	}
	s.reap()
	return s, nil
}

// StartKillableSupervisor is StartSupervisor for one that can be killed at an effect.
func (n *Node) StartKillableSupervisor(t testing.TB, flags ...string) *Supervisor {
	t.Helper()
	SkipWithoutMounts(t)
	s, err := n.SpawnSupervisor(flags...)
	allowed(t, err)
	s.tie(t)
	s.serving(t, n)
	return s
}

func (n *Node) supervisorProcess(flags []string) *Process {
	cmd := exec.Command(Built.Supervisor, append([]string{
		"--mps-dir=" + n.MPSDir, "--driver-root=" + n.DriverRoot(),
		"--check-interval=50ms", "-v=4",
	}, flags...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	return newProcess(cmd)
}

// tie ends the supervisor with the test.
func (s *Supervisor) tie(t testing.TB) {
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			t.Logf("log of the supervisor:\n%s", s.Log)
		}
	})
}

// serving waits until the supervisor listens.
func (s *Supervisor) serving(t testing.TB, n *Node) {
	t.Helper()
	s.Until(t, "the supervisor's socket", func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(n.MPSDir, supervisorSocket))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// mounts is the error of an attempt to mount, which the supervisor needs.
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

// SkipWithoutMounts skips the test where mounting is not allowed.
func SkipWithoutMounts(t testing.TB) {
	t.Helper()
	if err := mounts(); errors.Is(err, unix.EPERM) {
		t.Skipf("the MPS supervisor mounts: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
}
