// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package process starts processes that outlive the program that starts them, and
// finds, watches and ends them from the next run of that program. It also tells who
// listens on a socket, and which devices a process has open.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a process whose end is noticed. A nil Process has ended.
type Process struct {
	ID

	done chan struct{}
	// how and exit say how it ended, once done is closed.
	how  string
	exit Exit
}

// Start starts a command in a session of its own, so that no signal to this
// process's group reaches it.
func Start(cmd *exec.Cmd) (*Process, error) {
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{done: make(chan struct{})}
	var err error
	// It has not been waited for yet, so its state can be read even if it has ended.
	if p.ID, err = Identify(cmd.Process.Pid); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	go p.await(cmd)
	return p, nil
}

// await waits for the end of a command.
func (p *Process) await(cmd *exec.Cmd) {
	defer close(p.done)
	_ = cmd.Wait()
	if cmd.ProcessState == nil { // somebody else has waited for it
		p.how = "exit status unknown"
		return
	}
	p.how = cmd.ProcessState.String()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		p.exit = Exit{Known: true, Status: status}
	}
}

// Adopt watches a process that another program started, until unwatched is
// closed. It returns nil if the process has ended.
func Adopt(id ID, unwatched <-chan struct{}) (*Process, error) {
	fd, err := id.open(unix.PIDFD_NONBLOCK)
	if err != nil || fd < 0 {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), id.String())
	connection, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", id, err), file.Close())
	}
	p := &Process{ID: id, done: make(chan struct{})}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		// The descriptor becomes readable when the process ends.
		err := connection.Read(func(fd uintptr) bool {
			n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			if n > 0 {
				p.exit = id.exit(int(fd))
			}
			return n > 0
		})
		if err == nil {
			p.how = p.exit.String()
			close(p.done)
		}
	}()
	go func() {
		select {
		case <-unwatched:
		case <-stopped:
		}
		_ = file.Close()
	}()
	return p, nil
}

// Done returns a channel that is closed when the process ends.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended reports whether the process is known to have ended.
func (p *Process) Ended() bool {
	if p == nil {
		return true
	}
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// How describes how the process ended. It must have.
func (p *Process) How() string { return p.how }

// Exit returns how the process ended. It must have.
func (p *Process) Exit() Exit { return p.exit }

// Wait waits for the process to end and reports whether it did within limit.
func (p *Process) Wait(ctx context.Context, limit time.Duration) bool {
	select {
	case <-p.done:
		return true
	case <-time.After(limit):
	case <-ctx.Done():
	}
	return p.Ended()
}

// Context returns a context that is also canceled when the process ends. The
// cause calls the process name.
func (p *Process) Context(ctx context.Context, name string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	finished := make(chan struct{})
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("%s (%s) ended: %s", name, p.ID, p.how))
		case <-ctx.Done():
		case <-finished:
		}
	}()
	return ctx, func() { close(finished); cancel(nil) }
}
