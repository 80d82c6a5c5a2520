// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/wait"
)

// Mark is by what processes are found whose PID was never written down: a
// variable in their environment, which their children inherit.
type Mark struct {
	// Env is the variable, as NAME=value.
	Env string
	// Commands are the names that the kernel may have for these processes, which
	// it cuts to 15 bytes. The environment of others is not read.
	Commands []string
}

// On reports whether the process was started with the variable.
func (m Mark) On(id ID) bool {
	return bytes.Contains(append([]byte{0}, environmentOf(id)...), []byte("\x00"+m.Env+"\x00"))
}

// Find returns all running processes with the mark. It also reaps those that ended
// after their parent.
func (m Mark) Find() ([]ID, error) {
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	session, err := unix.Getsid(0)
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	namespace, err := pidNamespace("self")
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	var found []ID
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// A process whose state cannot be read has ended.
		st, err := readStat(pid)
		if err != nil || !slices.Contains(m.Commands, st.name) {
			continue
		}
		id := ID{PID: pid, Start: st.start}
		if st.ended() {
			// What Start started leads its session, and plain commands are in the
			// session of this process; both are waited for where they were started.
			if st.parent == os.Getpid() && st.session != pid && st.session != session {
				id.Reap()
			}
			continue
		}
		// A process in a container can choose its name and its environment, but it
		// is in another PID namespace.
		if its, err := pidNamespace(entry.Name()); err != nil || its != namespace {
			continue
		}
		if m.On(id) {
			found = append(found, id)
		}
	}
	return found, nil
}

// Kill ends all processes with the mark, and these others, and returns when they
// have ended.
func (m Mark) Kill(ctx context.Context, others []ID) error {
	for round := 0; ; round++ {
		left, err := m.Find()
		if err != nil {
			return err
		}
		for _, id := range others {
			if id.Alive() {
				left = append(left, id)
			} else {
				id.Reap()
			}
		}
		if len(left) == 0 {
			return nil
		}
		if round > 0 && ctx.Err() != nil {
			return fmt.Errorf("%s appeared while others like it were killed: %w", left[0], context.Cause(ctx))
		}
		for _, id := range left {
			if err := id.Signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		if err := awaitEnd(ctx, left); err != nil {
			return err
		}
	}
}

func awaitEnd(ctx context.Context, ids []ID) error {
	for _, id := range ids {
		ended := func() (bool, error) { return !id.Alive(), nil }
		if err := wait.Until(ctx, ended); err != nil {
			return fmt.Errorf("%s was killed and does not end, it may be waiting for the GPU: %w", id, err)
		}
		id.Reap()
	}
	return nil
}

// pidNamespace names the PID namespace of a process.
func pidNamespace(process string) (string, error) {
	return os.Readlink(filepath.Join(procRoot, process, "ns/pid"))
}

// readings of environments in progress.
var readings wait.Looks[ID, []byte]

// environ reads the environment of a process as the kernel has it. Tests replace it.
var environ = func(id ID) ([]byte, error) {
	return os.ReadFile(filepath.Join(procRoot, strconv.Itoa(id.PID), "environ"))
}

// readEnvironment reads the environment of a process, which is empty for a moment while
// it becomes another program (environ_read in fs/proc/base.c of Linux). A process that
// has none after the limit really has none.
func readEnvironment(id ID, limit time.Duration) []byte {
	const pause = 5 * time.Millisecond
	for end := time.Now().Add(limit); ; time.Sleep(pause) {
		// A process whose environment cannot be read has ended.
		if data, err := environ(id); err != nil || len(data) > 0 || time.Now().After(end) {
			return data
		}
	}
}

// environmentOf returns the environment of a process, or nothing when it cannot be
// read in time: reading the environment of a process that is stuck in its driver
// may block for ever. The session of such a process knows it by its PID; a search
// for other processes must not get stuck with it.
func environmentOf(id ID) []byte {
	const limit = time.Second
	data, err := readings.Do(id, limit, func() ([]byte, error) { return readEnvironment(id, limit), nil })
	if err != nil {
		return nil
	}
	return data
}
