// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/util/wait"
)

// procRoot is where this process sees itself and its children. It is not one of
// host.Roots: a simulated machine has no processes of its own.
const procRoot = "/proc"

// ID identifies a process beyond its end, when its PID may be reused.
type ID struct {
	PID int `json:"pid"`
	// Start is when the process started, in clock ticks since boot.
	Start uint64 `json:"start"`
}

// Identify returns the ID of a running process, or of one that has ended and was
// not waited for yet.
func Identify(pid int) (ID, error) { return IdentifyIn(procRoot, pid) }

// IdentifyIn is Identify for a process by its PID in another procfs.
func IdentifyIn(procfs string, pid int) (ID, error) {
	st, err := statIn(procfs, pid)
	return ID{PID: pid, Start: st.start}, err
}

// Parent returns the PID of a process's parent.
func Parent(pid int) (int, error) {
	st, err := readStat(pid)
	return st.parent, err
}

// User returns the ID of the user as whom a process runs. It is empty if the process has ended.
func User(pid int) string {
	// The folder's owner would be root for one that has given up its rights.
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "status"))
	if err != nil {
		return ""
	}
	_, users, _ := strings.Cut(string(data), "\nUid:")
	if fields := strings.Fields(users); len(fields) > 0 {
		return fields[0]
	}
	return ""
}

// DescendsFrom reports whether a process is another one, or was started by that or its descendants. An orphan
// is the child of the process that has adopted it.
func (id ID) DescendsFrom(ancestor ID) bool {
	const generations = 16 // nobody has as many
	pid := id.PID
	for range generations {
		if pid == ancestor.PID {
			return id.Alive() && ancestor.Alive()
		}
		parent, err := Parent(pid)
		if err != nil || parent <= 1 {
			return false
		}
		pid = parent
	}
	return false
}

// Children returns the PIDs of a process's children that run.
func Children(pid int) ([]int, error) {
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		return nil, fmt.Errorf("find the children of PID %d: %w", pid, err)
	}
	var children []int
	for _, entry := range entries {
		child, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if st, err := readStat(child); err == nil && st.parent == pid && !st.ended() {
			children = append(children, child)
		}
	}
	return children, nil
}

// PIDs returns the PID of each ID.
func PIDs(ids []ID) []int {
	pids := make([]int, len(ids))
	for i, id := range ids {
		pids[i] = id.PID
	}
	return pids
}

// Alive reports whether a process with this PID is running. 0 stands for a process in
// another PID namespace, which cannot be seen.
func Alive(pid int) bool {
	id, err := Identify(pid)
	return err == nil && id.Alive()
}

func (id ID) String() string { return "PID " + strconv.Itoa(id.PID) }

// Alive reports whether the process is running. A zombie is not.
func (id ID) Alive() bool {
	st, err := readStat(id.PID)
	return err == nil && st.start == id.Start && !st.ended()
}

// Signal sends a signal to this process and to no other. A process that has ended
// is no error.
func (id ID) Signal(signal unix.Signal) error {
	fd, err := id.open(0)
	if err != nil || fd < 0 {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to %s: %w", unix.SignalName(signal), id, err)
	}
	return nil
}

// Kill kills the process, and returns when it has ended.
func (id ID) Kill(ctx context.Context) error {
	if err := id.Signal(unix.SIGKILL); err != nil {
		return err
	}
	if err := wait.Until(ctx, func() (bool, error) { return !id.Alive(), nil }); err != nil {
		return fmt.Errorf("%s was killed and does not end, it may be waiting for the GPU: %w", id, err)
	}
	return nil
}

// open returns a descriptor of the process, or a negative number if it has ended.
func (id ID) open(flags int) (int, error) {
	fd, err := unix.PidfdOpen(id.PID, flags)
	if errors.Is(err, unix.ESRCH) {
		return -1, nil
	}
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", id, err)
	}
	// The descriptor keeps the PID from being reused, so this stays true.
	if !id.Alive() {
		return -1, unix.Close(fd)
	}
	return fd, nil
}

// stat is the part of /proc/<pid>/stat that matters here. Reading it does not
// wait for the process.
type stat struct {
	state   byte
	parent  int
	threads int
	start   uint64
	// exit is the status of a process that has ended, as wait(2) reports it, or 0.
	exit int
}

// ended reports whether the process has ended. The state is that of its first
// thread; others may still be waiting for the GPU.
func (s stat) ended() bool { return (s.state == 'Z' || s.state == 'X') && s.threads <= 1 }

func readStat(pid int) (stat, error) { return statIn(procRoot, pid) }

func statIn(procfs string, pid int) (stat, error) {
	data, err := os.ReadFile(filepath.Join(procfs, strconv.Itoa(pid), "stat"))
	if err != nil {
		return stat{}, fmt.Errorf("read the state of PID %d: %w", pid, err)
	}
	return parseStat(pid, string(data))
}

func parseStat(pid int, data string) (stat, error) {
	// The name is in parentheses and may contain any byte, including ") ".
	end := max(0, strings.LastIndex(data, ") "))
	fields := strings.Fields(data[min(len(data), end+2):])
	// Fields 20, 22 and 52 of proc_pid_stat(5), which counts from 1 and has two fields
	// before the state.
	const threadsField, startField, exitField = 20 - 3, 22 - 3, 52 - 3
	if len(fields) <= startField {
		return stat{}, fmt.Errorf("read the state of PID %d: cannot parse %q", pid, data)
	}
	st := stat{state: fields[0][0]}
	var errs [4]error
	st.parent, errs[0] = strconv.Atoi(fields[1])
	st.threads, errs[1] = strconv.Atoi(fields[threadsField])
	st.start, errs[2] = strconv.ParseUint(fields[startField], 10, 64)
	if len(fields) > exitField {
		st.exit, errs[3] = strconv.Atoi(fields[exitField])
	}
	if err := errors.Join(errs[:]...); err != nil {
		return stat{}, fmt.Errorf("read the state of PID %d: %w", pid, err)
	}
	return st, nil
}
