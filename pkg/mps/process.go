// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// markerVariable is set for daemons and so for all that they start; it names the
// session's folder.
const markerVariable = "PARTAGE_MPS_FOLDER"

// procRoot is where this process sees itself and its children. It is not one of
// the rooted paths: a simulated machine has no processes.
const procRoot = "/proc"

// processID is a process for good: PIDs are used again.
type processID struct {
	PID int `json:"pid"`
	// Start is the time of its start in ticks since the boot.
	Start uint64 `json:"start"`
}

// identify returns what is needed to know a process again. It works for a process
// that has ended and was not waited for yet.
func identify(pid int) (processID, error) {
	st, err := readStat(pid)
	return processID{PID: pid, Start: st.start}, err
}

func (p processID) String() string { return "PID " + strconv.Itoa(p.PID) }

// alive tells whether the process still does something; one that only waits to be
// collected by its parent does not.
func (p processID) alive() bool {
	st, err := readStat(p.PID)
	return err == nil && st.start == p.Start && !st.over()
}

// stat is what the kernel tells about a process without stopping it.
type stat struct {
	// name is cut to 15 bytes.
	name            string
	state           byte
	parent, session int
	threads         int
	start           uint64
}

// over tells whether the process has ended. The state is that of its first thread,
// after which others may still be waiting for the GPU.
func (s stat) over() bool { return (s.state == 'Z' || s.state == 'X') && s.threads <= 1 }

func readStat(pid int) (stat, error) {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return stat{}, fmt.Errorf("read the state of PID %d: %w", pid, err)
	}
	// The name is in parentheses and may have any bytes in it.
	before, after, ok := cutLast(string(data), ") ")
	_, name, _ := strings.Cut(before, "(")
	fields := strings.Fields(after)
	// The 20th and the 22nd of all, less PID and name, from 0.
	const threadsField, startField = 17, 19
	if !ok || len(fields) <= startField {
		return stat{}, fmt.Errorf("read the state of PID %d: cannot make sense of %q", pid, data)
	}
	st := stat{name: name, state: fields[0][0]}
	var errs [4]error
	st.parent, errs[0] = strconv.Atoi(fields[1])
	st.session, errs[1] = strconv.Atoi(fields[3])
	st.threads, errs[2] = strconv.Atoi(fields[threadsField])
	st.start, errs[3] = strconv.ParseUint(fields[startField], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return stat{}, fmt.Errorf("read the state of PID %d: %w", pid, err)
	}
	return st, nil
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// signal sends one to this process and to no other. That it has ended is no error.
func (p processID) signal(signal unix.Signal) error {
	fd, err := p.open(0)
	if err != nil || fd < 0 {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to %s: %w", unix.SignalName(signal), p, err)
	}
	return nil
}

// open returns a descriptor of the process, or a negative number if it has ended.
func (p processID) open(flags int) (int, error) {
	fd, err := unix.PidfdOpen(p.PID, flags)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", p, err)
	}
	// The descriptor holds the PID, so what is true now stays true.
	if !p.alive() {
		return -1, unix.Close(fd)
	}
	return fd, nil
}

// collect takes the end of a process that became a child of this one because its
// parent ended before it.
func (p processID) collect() {
	if st, err := readStat(p.PID); err == nil && st.start == p.Start && st.over() {
		_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
	}
}

// process is one whose end is noticed.
type process struct {
	processID

	done chan struct{}
	// how it ended, once done is closed.
	how string
}

// spawn starts a command that is to outlive this process if need be.
func spawn(cmd *exec.Cmd) (*process, error) {
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{done: make(chan struct{})}
	var err error
	// Nobody has waited for it, so it can be read even if it has ended.
	if p.processID, err = identify(cmd.Process.Pid); err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait()
		p.how = cmd.ProcessState.String()
	}()
	return p, nil
}

// adopt watches a process that another one started, until nobody wants to know any
// more. It returns nil if the process has ended.
func adopt(id processID, unwatched <-chan struct{}) (*process, error) {
	fd, err := id.open(unix.PIDFD_NONBLOCK)
	if err != nil || fd < 0 {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), id.String())
	connection, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", id, err), file.Close())
	}
	p := &process{processID: id, done: make(chan struct{})}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		// It becomes readable with the end of the process.
		err := connection.Read(func(fd uintptr) bool {
			n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0
		})
		if err == nil {
			id.collect()
			p.how = "its end was seen from outside"
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

// ended tells whether the process is known to have ended. A nil process has.
func (p *process) ended() bool {
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

// wait returns whether the process ended within the time.
func (p *process) wait(ctx context.Context, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return p.ended()
}

// while returns a context that also ends when the process does.
func (p *process) while(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	finished := make(chan struct{})
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("the control daemon (%s) ended: %s", p.processID, p.how))
		case <-ctx.Done():
		case <-finished:
		}
	}()
	return ctx, func() { close(finished); cancel(nil) }
}

const (
	shortestPoll = 5 * time.Millisecond
	longestPoll  = 100 * time.Millisecond
)

// poll asks until the answer is yes, more seldom the longer it takes. Its error is
// the one of the question, or why ctx ended.
func poll(ctx context.Context, question func() (bool, error)) error {
	pause := shortestPoll
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		if yes, err := question(); yes || err != nil {
			return err
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
			pause = min(longestPoll, pause*3/2)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
