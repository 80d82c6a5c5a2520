// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sandbox gives a node namespaces and control groups of its own, so that it can use the standard paths, ports and
// device names without touching the machine, and so that ending one process ends all of it.
//
// A node's first process goes through two programs: the caller starts "gate" in new namespaces, moves it into the node's
// control groups, connects its network to other nodes', and opens the gate; gate then takes a control group namespace, which
// the kernel roots where the process is, and becomes "init", the node's PID 1.
package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
)

// EventsFD is the descriptor on which the first process reports to whoever starts it.
const EventsFD = 3

// Process is the first process of a node, seen from outside.
type Process struct {
	PID    int
	Events io.ReadCloser
	gate   *os.File
	cmd    *exec.Cmd
	done   chan struct{}
}

// Start runs this program again, with the arguments, as the gate of new namespaces, which waits for Open. Its errors go to log.
// It dies with the caller until Detach.
func Start(groups cgroup.Groups, gateArgs []string, log *os.File) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	gateOut, gateIn, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	defer gateOut.Close()
	events, eventsIn, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a pipe: %w", err), gateIn.Close())
	}
	defer eventsIn.Close()
	cmd := exec.Command(self, gateArgs...) //nolint:noctx // the node outlives the caller
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = gateOut, log, log
	cmd.ExtraFiles = []*os.File{eventsIn}
	cmd.SysProcAttr = &unix.SysProcAttr{
		Setsid:     true, // Ctrl-C is for the caller, which ends the node in order
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
	}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start a process in new namespaces: %w", err), gateIn.Close(), events.Close())
	}
	p := &Process{PID: cmd.Process.Pid, Events: events, gate: gateIn, cmd: cmd, done: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(p.done) }()
	if err := groups.Add(p.PID); err != nil {
		return nil, errors.Join(err, p.Kill())
	}
	return p, nil
}

// Open lets the process go on and become the node's first.
func (p *Process) Open() error {
	if _, err := p.gate.WriteString(opened); err != nil {
		return fmt.Errorf("open the gate: %w", err)
	}
	return nil
}

const (
	opened   = "o"
	detached = "d"
)

// Detach lets the process outlive its caller.
func (p *Process) Detach() error {
	if _, err := p.gate.WriteString(detached); err != nil {
		return fmt.Errorf("detach the node: %w", err)
	}
	return p.gate.Close()
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill ends everything in the namespaces and waits for it.
func (p *Process) Kill() error {
	_ = p.gate.Close()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the node: %w", err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(killLimit):
		return fmt.Errorf("process %d did not end within %s of being killed", p.PID, killLimit)
	}
}

const killLimit = 20 * time.Second

// Gate is the first program: it waits for the gate to open, takes a control group namespace and becomes args.
func Gate(args []string) error {
	if err := expect(opened); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	runtime.LockOSThread() // unshare and exec must be the same thread's: exec keeps its namespaces for the process
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a control group namespace: %w", err)
	}
	// Descriptor 3 is inherited as it is: exec.Cmd cleared its close-on-exec flag.
	if err := unix.Exec(self, append([]string{self}, args...), os.Environ()); err != nil {
		return fmt.Errorf("run %s again: %w", self, err)
	}
	return nil
}

// WatchCaller calls died when the caller ends before Detach.
func WatchCaller(died func()) {
	go func() {
		if err := expect(detached); err != nil {
			died()
		}
	}()
}

func expect(word string) error {
	b := make([]byte, 1)
	if _, err := io.ReadFull(os.Stdin, b); err != nil {
		return fmt.Errorf("the caller has ended: %w", err)
	}
	if string(b) != word {
		return fmt.Errorf("the caller said %q, want %q", b, word)
	}
	return nil
}
