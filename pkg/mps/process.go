// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
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
	_, start, err := readStat(pid)
	return processID{PID: pid, Start: start}, err
}

func (p processID) String() string { return "PID " + strconv.Itoa(p.PID) }

// alive tells whether the process still does something; one that only waits to be
// collected by its parent does not.
func (p processID) alive() bool {
	state, start, err := readStat(p.PID)
	return err == nil && start == p.Start && state != 'Z' && state != 'X'
}

func readStat(pid int) (state byte, start uint64, err error) {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0, fmt.Errorf("read the state of PID %d: %w", pid, err)
	}
	// The name is in parentheses and may have any bytes in it.
	_, rest, ok := cutLast(string(data), ") ")
	fields := strings.Fields(rest)
	const startField = 19 // the 22nd of all, less PID and name, from 0
	if !ok || len(fields) <= startField {
		return 0, 0, fmt.Errorf("read the state of PID %d: cannot make sense of %q", pid, data)
	}
	start, err = strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("read the state of PID %d: start time: %w", pid, err)
	}
	return fields[0][0], start, nil
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// userOf returns the user that a process runs as.
func userOf(pid int) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(procRoot, strconv.Itoa(pid)), &st); err != nil {
		return 0, fmt.Errorf("user of PID %d: %w", pid, err)
	}
	return st.Uid, nil
}

// signal sends one to this process and to no other. That it has ended is no error.
func (p processID) signal(signal unix.Signal) error {
	fd, err := p.open()
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
func (p processID) open() (int, error) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
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
	if state, start, err := readStat(p.PID); err == nil && start == p.Start && state == 'Z' {
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
	fd, err := id.open()
	if err != nil || fd < 0 {
		return nil, err
	}
	p := &process{processID: id, done: make(chan struct{})}
	go func() {
		defer func() { _ = unix.Close(fd) }()
		for {
			select {
			case <-unwatched:
				return
			default:
			}
			// The limit only bounds how long this goes on after that.
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 500)
			if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				id.collect()
				p.how = "its end was seen from outside"
				close(p.done)
				return
			}
		}
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

// marked finds all processes with the variable in their environment.
func marked(marker string) ([]processID, error) {
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	var found []processID
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// What cannot be read has ended, or is a thread of the kernel.
		environment, err := os.ReadFile(filepath.Join(procRoot, entry.Name(), "environ"))
		if err != nil || !bytes.Contains(append([]byte{0}, environment...), []byte("\x00"+marker+"\x00")) {
			continue
		}
		if id, err := identify(pid); err == nil {
			found = append(found, id)
		}
	}
	return found, nil
}

// killMarked ends all processes with the variable, and these. It returns when they
// have gone.
func killMarked(ctx context.Context, marker string, others []processID) error {
	for {
		left, err := marked(marker)
		if err != nil {
			return err
		}
		for _, p := range others {
			if p.alive() {
				left = append(left, p)
			} else {
				p.collect()
			}
		}
		if len(left) == 0 {
			return nil
		}
		for _, p := range left {
			if err := p.signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		if err := allGone(ctx, left); err != nil {
			return err
		}
	}
}

func allGone(ctx context.Context, processes []processID) error {
	for _, p := range processes {
		gone := func() (bool, error) { return !p.alive(), nil }
		if err := poll(ctx, gone); err != nil {
			return fmt.Errorf("%s does not end although it was killed, it may be waiting for the GPU: %w", p, err)
		}
		p.collect()
	}
	return nil
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
