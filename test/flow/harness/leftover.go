// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
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

	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// MPSProcesses are the names of keepers, daemons and servers of this machine by process ID,
// including those that are starting. Their environment says where the daemon's pipes are, and
// which GPUs it has; that of programs that ask the daemon says the first only.
func (n *MPSFolder) MPSProcesses() (map[int]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	pipe := regexp.MustCompile(`\x00CUDA_MPS_PIPE_DIRECTORY=` + regexp.QuoteMeta(n.MPSDir) + `/[^/\x00]+/pipe/daemon\x00`)
	all := map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// One that has ended has none of this any more.
		environment, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		environment = slices.Concat([]byte{0}, environment)
		if !pipe.Match(environment) || !bytes.Contains(environment, []byte("\x00CUDA_VISIBLE_DEVICES=")) {
			continue
		}
		if name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm")); err == nil {
			all[pid] = strings.TrimSpace(string(name))
		}
	}
	return all, nil
}

// MPSMounts are the mount points in the supervisor's folder.
func (n *MPSFolder) MPSMounts() ([]string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var points []string
	for line := range strings.Lines(string(data)) {
		const mountPoint = 4
		if fields := strings.Fields(line); len(fields) > mountPoint && strings.HasPrefix(fields[mountPoint], n.MPSDir+"/") {
			points = append(points, fields[mountPoint])
		}
	}
	slices.Sort(points)
	return points, nil
}

// endMPS kills all daemons and servers and removes all mounts, like the end of a node.
func (n *MPSFolder) endMPS() error {
	for end := time.Now().Add(Patience); ; time.Sleep(5 * time.Millisecond) {
		if err := n.KillMPS(); err != nil {
			return err
		}
		points, err := n.MPSMounts()
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

// KillMPS kills all daemons and servers, and waits until they are gone.
func (n *MPSFolder) KillMPS() error {
	for end := time.Now().Add(Patience); ; time.Sleep(time.Millisecond) {
		running, err := n.MPSProcesses()
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

// ClearMPS ends everything and empties the folder, which is in memory on a node.
func (n *MPSFolder) ClearMPS() error {
	if err := n.endMPS(); err != nil {
		return err
	}
	entries, err := os.ReadDir(n.MPSDir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(n.MPSDir, e.Name())))
	}
	return err
}

// Reboot reboots the machine while no driver and no supervisor run: all of MPS, all
// instances and CDI files are gone, and all device numbers change.
func (n *Node) Reboot(t testing.TB) {
	t.Helper()
	must.Do(t, n.ClearMPS())
	must.Do(t, sysroot.Reboot(n.Root, sysroot.RebootOptions{Renumber: true}))
	// The folder of CDI specs is not on a disk.
	for _, name := range n.CDISpecs(t) {
		must.Do(t, os.Remove(filepath.Join(n.CDIDir, name)))
	}
}

// UntilSnapshot waits until the node has exactly this. A driver may just be cleaning up by
// itself.
func (p *Driver) UntilSnapshot(t testing.TB, n *Node, want Snapshot) {
	t.Helper()
	p.Until(t, "nothing else to be left", func(context.Context) error {
		if diff := want.Diff(n.Snapshot(t)); diff != "" {
			return errors.New("(-want +got):\n" + diff)
		}
		return nil
	})
}
