// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

func supervisor(t *testing.T, statusFile string) *Supervisor {
	t.Helper()
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	t.Cleanup(func() { signal.Stop(children) })
	s := New([]string{"PATH=/usr/bin:/bin"}, statusFile)
	go s.Reap(t.Context(), children)
	return s
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	s := supervisor(t, "")
	log := filepath.Join(dir, "log")
	if err := s.Run(t.Context(), Spec{Name: "good", Args: []string{"sh", "-c", "echo one; echo two; echo three"}, Log: log}); err != nil {
		t.Fatal(err)
	}
	if got := Tail(log, 2); got != "two\nthree" {
		t.Errorf("tail = %q", got)
	}
	err := s.Run(t.Context(), Spec{Name: "bad", Args: []string{"sh", "-c", "exit 7"}, Log: log})
	var exit *ExitError
	if !errors.As(err, &exit) || exit.Status != "exit status 7" || exit.Log != log {
		t.Errorf("err = %v", err)
	}
	if err := s.Run(t.Context(), Spec{Name: "none", Args: []string{"no-such-program"}, Log: log}); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("err = %v", err)
	}
}

func TestServiceThatEndsEarlyFails(t *testing.T) {
	s := supervisor(t, "")
	if err := s.Start(t.Context(), Spec{Name: "short", Args: []string{"sh", "-c", "kill -KILL $$"}, Log: filepath.Join(t.TempDir(), "log")}); err != nil {
		t.Fatal(err)
	}
	if err := <-s.Failed(); err.Error() != "short ended: signal SIGKILL" {
		t.Errorf("err = %v", err)
	}
}

func TestSteadyServiceIsStartedAgain(t *testing.T) {
	dir := t.TempDir()
	status := filepath.Join(dir, "status")
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	s := supervisor(t, status)
	t.Cleanup(s.Wait) // before the folder goes
	s.Steady()
	// Each life of the service writes one line to the fifo.
	if err := s.Start(t.Context(), Spec{Name: "again", Args: []string{"sh", "-c", "echo alive > " + fifo}, Log: filepath.Join(dir, "log")}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if b, err := os.ReadFile(fifo); err != nil || string(b) != "alive\n" {
			t.Fatalf("fifo gave %q, %v", b, err)
		}
	}
	var got []Status
	b, err := os.ReadFile(status)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &got); err != nil || len(got) != 1 || got[0].LastExit != "exit status 0" {
		t.Errorf("status %s, %v", b, err)
	}
}

func TestServiceThatIsStopped(t *testing.T) {
	dir := t.TempDir()
	s := supervisor(t, "")
	t.Cleanup(s.Wait)
	s.Steady()
	ctx, stop := context.WithCancel(t.Context())
	if err := s.Start(ctx, Spec{Name: "long", Args: []string{"sleep", "1000"}, Log: filepath.Join(dir, "log")}); err != nil {
		t.Fatal(err)
	}
	if !s.Running("long") {
		t.Error("it does not count as running")
	}
	stop()
	if err := poll.Until(t.Context(), time.Minute, "the service to end", func(context.Context) error {
		if s.Running("long") {
			return errors.New("it still counts as running")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
