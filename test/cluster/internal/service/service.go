// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package service starts and supervises the programs of a node from the first process of its pid namespace.
package service

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

const restartDelay = time.Second

// Spec is one program to run.
type Spec struct {
	Name string
	Args []string // Args[0] is looked up in the supervisor's PATH
	Log  string   // stdout and stderr are appended here
}

// Status is what is known about one service, in the status file.
type Status struct {
	Name     string    `json:"name"`
	PID      int       `json:"pid"` // in the node's pid namespace; 0: not running
	Since    time.Time `json:"since"`
	Restarts int       `json:"restarts"`
	LastExit string    `json:"lastExit,omitempty"`
}

// ExitError says that a program ended, and where its log is.
type ExitError struct {
	Name, Log, Status string
}

// Error implements error.
func (e *ExitError) Error() string { return fmt.Sprintf("%s ended: %s", e.Name, e.Status) }

// LogError is an error whose cause is likely in a log.
type LogError struct {
	Log string
	Err error
}

// Error implements error.
func (e *LogError) Error() string { return e.Err.Error() }

// Unwrap implements errors.Unwrap.
func (e *LogError) Unwrap() error { return e.Err }

// LogOf returns the log that an error of this package points to, empty when there is none.
func LogOf(err error) string {
	var exit *ExitError
	var other *LogError
	switch {
	case errors.As(err, &exit):
		return exit.Log
	case errors.As(err, &other):
		return other.Log
	}
	return ""
}

// Supervisor runs services. Until Steady is called a service that ends is a failure, afterwards it is started again.
// All methods may be called from several goroutines.
type Supervisor struct {
	env        []string
	statusFile string
	failed     chan error

	keepers sync.WaitGroup

	mu      sync.Mutex
	steady  bool
	waiting map[int]child
	status  []*Status
}

type child struct {
	exit chan unix.WaitStatus
	// stopped is the service that was told to end, nil for all others.
	stopped *Status
}

// New returns a supervisor whose programs get env. It reaps every child of this process, so nothing else here may wait for one.
// The status file may be empty.
func New(env []string, statusFile string) *Supervisor {
	return &Supervisor{env: env, statusFile: statusFile, failed: make(chan error, 16), waiting: map[int]child{}}
}

// Failed gives the services that ended before Steady.
func (s *Supervisor) Failed() <-chan error { return s.failed }

// Steady says that the node is up.
func (s *Supervisor) Steady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steady = true
}

// Reap waits for children, orphans of the namespace included, each time children says that some ended (SIGCHLD).
// It returns when ctx ends.
func (s *Supervisor) Reap(ctx context.Context, children <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-children:
			s.reapAll()
		}
	}
}

func (s *Supervisor) reapAll() {
	s.mu.Lock() // also held from fork to registration, so that no status is lost
	defer s.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if c, ok := s.waiting[pid]; ok {
			delete(s.waiting, pid)
			s.remove(c.stopped)
			c.exit <- status
		}
	}
}

// remove needs mu.
func (s *Supervisor) remove(st *Status) {
	s.status = slices.DeleteFunc(s.status, func(other *Status) bool { return other == st })
}

// Running says whether there is a service of that name: one that was started and has not ended since its context has.
func (s *Supervisor) Running(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.status, func(st *Status) bool { return st.Name == name })
}

// Start runs a service until ctx ends, and then kills it.
func (s *Supervisor) Start(ctx context.Context, spec Spec) error {
	st := &Status{Name: spec.Name}
	s.mu.Lock()
	s.status = append(s.status, st)
	s.mu.Unlock()
	done, err := s.launch(spec, st)
	if err != nil {
		return err
	}
	s.keepers.Go(func() { s.keep(ctx, spec, st, done) })
	return nil
}

// Wait returns once nothing is done any more for services whose context has ended.
func (s *Supervisor) Wait() { s.keepers.Wait() }

func (s *Supervisor) keep(ctx context.Context, spec Spec, st *Status, done <-chan unix.WaitStatus) {
	for {
		var exit unix.WaitStatus
		select {
		case <-ctx.Done():
			s.stop(st)
			return
		case exit = <-done:
		}
		s.mu.Lock()
		st.PID, st.LastExit, st.Since = 0, describe(exit), time.Now()
		steady := s.steady
		s.mu.Unlock()
		s.publish()
		if !steady {
			s.failed <- &ExitError{Name: spec.Name, Log: spec.Log, Status: describe(exit)}
			return
		}
		for {
			select {
			case <-ctx.Done():
				s.stop(st)
				return
			case <-time.After(restartDelay):
			}
			next, err := s.launch(spec, st)
			if err == nil {
				done = next
				break
			}
		}
		s.mu.Lock()
		st.Restarts++
		s.mu.Unlock()
		s.publish()
	}
}

func (s *Supervisor) stop(st *Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, runs := s.waiting[st.PID]
	if !runs {
		s.remove(st)
		return
	}
	// Not reaped: the number is still its own.
	c.stopped = st
	s.waiting[st.PID] = c
	_ = unix.Kill(st.PID, unix.SIGKILL)
}

// Run runs a program to its end. A non-zero status is an *ExitError.
func (s *Supervisor) Run(ctx context.Context, spec Spec) error {
	st := &Status{Name: spec.Name}
	done, err := s.launch(spec, st)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		_ = unix.Kill(st.PID, unix.SIGKILL)
		return fmt.Errorf("run %s: %w", spec.Name, context.Cause(ctx))
	case exit := <-done:
		if exit != 0 {
			return &ExitError{Name: spec.Name, Log: spec.Log, Status: describe(exit)}
		}
		return nil
	}
}

func (s *Supervisor) launch(spec Spec, st *Status) (<-chan unix.WaitStatus, error) {
	path, err := s.find(spec.Args[0])
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	log, err := os.OpenFile(spec.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) // for reading
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", spec.Name, err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	defer null.Close()
	done := make(chan unix.WaitStatus, 1)
	s.mu.Lock()
	p, err := os.StartProcess(path, spec.Args, &os.ProcAttr{
		Dir: "/", Env: s.env, Files: []*os.File{null, log, log}, Sys: &unix.SysProcAttr{Setsid: true},
	})
	if err == nil {
		s.waiting[p.Pid] = child{exit: done}
		st.PID, st.Since = p.Pid, time.Now()
		err = p.Release()
	}
	s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	s.publish()
	return done, nil
}

// find looks name up in the PATH that the program will have, not in this process's.
func (s *Supervisor) find(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, e := range s.env {
		path, ok := strings.CutPrefix(e, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(path) {
			if file := filepath.Join(dir, name); unix.Access(file, unix.X_OK) == nil {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// publish writes the status file; it only informs, so an error does not stop the node.
func (s *Supervisor) publish() {
	if s.statusFile == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, err := json.MarshalIndent(s.status, "", "  "); err == nil {
		_ = renameio.WriteFile(s.statusFile, b, 0o644)
	}
}

func describe(w unix.WaitStatus) string {
	if w.Signaled() {
		return "signal " + unix.SignalName(w.Signal())
	}
	return fmt.Sprintf("exit status %d", w.ExitStatus())
}

// Tail returns the last n lines of a log, empty when there is none.
func Tail(path string, n int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(bytes.TrimRight(b, "\n"), []byte("\n"))
	return string(bytes.Join(slices.Clip(lines[max(0, len(lines)-n):]), nil))
}
