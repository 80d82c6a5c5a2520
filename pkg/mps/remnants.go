// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// commandNames are what the kernel calls the processes that carry a marker: MPS,
// and the launcher before it becomes MPS.
var commandNames = []string{programName[:15], filepath.Base(self)}

// marked finds all processes with the variable in their environment, and collects
// servers that ended after their daemon.
func marked(marker string) ([]processID, error) {
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
	var found []processID
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// What cannot be read has ended.
		st, err := readStat(pid)
		if err != nil || !slices.Contains(commandNames, st.name) {
			continue
		}
		id := processID{PID: pid, Start: st.start}
		if st.over() {
			// Daemons lead their sessions and commands are in ours; these two are
			// waited for by who started them.
			if st.parent == os.Getpid() && st.session != pid && st.session != session {
				id.collect()
			}
			continue
		}
		// What is in a container can call itself what it likes. Ours are not: their
		// PIDs are those that the supervisor sees.
		if its, err := pidNamespace(entry.Name()); err != nil || its != namespace {
			continue
		}
		if id.hasMarker(marker) {
			found = append(found, id)
		}
	}
	return found, nil
}

// pidNamespace names the one that a process is in.
func pidNamespace(process string) (string, error) {
	return os.Readlink(filepath.Join(procRoot, process, "ns/pid"))
}

// hasMarker tells whether the process was started with the variable.
func (p processID) hasMarker(marker string) bool {
	return bytes.Contains(append([]byte{0}, environmentOf(p)...), []byte("\x00"+marker+"\x00"))
}

// reading is one of a process's environment.
type reading struct {
	began time.Time
	done  chan struct{}
	data  []byte
}

// readings in progress by processID.
var readings sync.Map

// environmentOf returns what can be read in time. For a process that is stuck in its
// driver even this read may not return. Its own session knows it by its PID; others,
// which only look for theirs, must not get stuck with it.
func environmentOf(id processID) []byte {
	const limit = time.Second
	mine := &reading{began: time.Now(), done: make(chan struct{})}
	stored, _ := readings.LoadOrStore(id, mine)
	r, _ := stored.(*reading)
	if r == mine {
		go func() {
			defer readings.Delete(id)
			defer close(r.done)
			// What cannot be read has ended.
			r.data, _ = os.ReadFile(filepath.Join(procRoot, strconv.Itoa(id.PID), "environ"))
		}()
	}
	// One that has been stuck for long holds up nobody any more.
	timer := time.NewTimer(limit - time.Since(r.began))
	defer timer.Stop()
	select {
	case <-r.done:
		return r.data
	case <-timer.C:
		return nil
	}
}

// killMarked ends all processes with the variable, and these. It returns when they
// have gone.
func killMarked(ctx context.Context, marker string, others []processID) error {
	for round := 0; ; round++ {
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
		if round > 0 && ctx.Err() != nil {
			return fmt.Errorf("%s came when others like it had been killed: %w", left[0], context.Cause(ctx))
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
