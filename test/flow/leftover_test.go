// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// mpsProcesses are the daemons and servers of this machine, and what is to become
// one, by process ID. They have a variable in their environment that names their
// session's folder; what talks to them has only some that name folders in it.
func (n *node) mpsProcesses() (map[int]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	session := regexp.MustCompile(`=` + regexp.QuoteMeta(n.mps) + `/[^/\x00]+\x00`)
	all := map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// One that has ended has none of this any more.
		environment, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if !session.Match(environment) {
			continue
		}
		if name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm")); err == nil {
			all[pid] = strings.TrimSpace(string(name))
		}
	}
	return all, nil
}

// mpsMounts are the mount points in the supervisor's folder.
func (n *node) mpsMounts() ([]string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		const mountPoint = 4
		if fields := strings.Fields(line); len(fields) > mountPoint && strings.HasPrefix(fields[mountPoint], n.mps+"/") {
			points = append(points, fields[mountPoint])
		}
	}
	slices.Sort(points)
	return points, nil
}

// endMPS kills all daemons and servers and takes all mounts away, as a node does
// that goes down.
func (n *node) endMPS() error {
	for end := time.Now().Add(eventually); ; time.Sleep(5 * time.Millisecond) {
		if err := n.killMPS(); err != nil {
			return err
		}
		points, err := n.mpsMounts()
		if err != nil {
			return err
		}
		for _, point := range slices.Backward(points) {
			if err := unix.Unmount(point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
				return fmt.Errorf("unmount %s: %w", point, err)
			}
		}
		if len(points) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("mounts %v do not end", points)
		}
	}
}

// killMPS kills all daemons and servers, and waits until they are gone.
func (n *node) killMPS() error {
	for end := time.Now().Add(eventually); ; time.Sleep(time.Millisecond) {
		running, err := n.mpsProcesses()
		if err != nil || len(running) == 0 {
			return err
		}
		for pid := range running {
			// It fails for one that has just ended.
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if time.Now().After(end) {
			return fmt.Errorf("processes %v do not end", running)
		}
	}
}

// clearMPS ends everything and empties the folder, which is not on a disk.
func (n *node) clearMPS() error {
	if err := n.endMPS(); err != nil {
		return err
	}
	entries, err := os.ReadDir(n.mps)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(n.mps, e.Name())))
	}
	return err
}

// untilLeft waits until exactly this is there. The driver may just be looking whether
// there is anything to clean up, and has locks then.
func (p *process) untilLeft(t testing.TB, n *node, want traces) {
	t.Helper()
	p.until(t, "nothing else to be left", func(context.Context) error {
		if diff := want.diff(n.traces(t)); diff != "" {
			return errors.New("(-want +got):\n" + diff)
		}
		return nil
	})
}
