// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

const powerOffLimit = 20 * time.Second

// podGroup is the control group below which the kubelet makes those of pods.
const podGroup = "kubepods"

// PowerOff does to its own node what a power cut does: containers end without a signal that they could handle, mounts and the
// control groups of pods are gone, and /run is empty except for the paths to keep. The programs that manage containers must have
// ended; shim is the program between them and the containers.
func PowerOff(ctx context.Context, shim string, keep ...string) error {
	if err := poll.Until(ctx, powerOffLimit, "the containers to end", func(context.Context) error {
		return killContainers(shim)
	}); err != nil {
		return err
	}
	// A kubelet that found them would look in each for a container, three seconds long.
	if err := cgroup.Remove(ctx, podGroup, powerOffLimit); err != nil {
		return err
	}
	for _, dir := range []string{"/run", "/var/lib/kubelet", "/var/lib/containerd"} {
		if err := UnmountBelow(dir); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir("/run")
	if err != nil {
		return fmt.Errorf("empty /run: %w", err)
	}
	for _, e := range entries {
		if path := filepath.Join("/run", e.Name()); !slices.Contains(keep, path) {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("empty /run: %w", err)
			}
		}
	}
	for _, dir := range runFolders {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the folders of /run: %w", err)
		}
	}
	return nil
}

// killContainers kills the shims and everything below them, and returns an error while there is any.
func killContainers(shim string) error {
	parents, err := processes()
	if err != nil {
		return err
	}
	killed := 0
	for pid := range parents {
		if !below(pid, parents, shim) {
			continue
		}
		killed++
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
	}
	if killed > 0 {
		return fmt.Errorf("%d processes of containers were still there", killed)
	}
	return nil
}

type process struct {
	parent int
	exe    string
}

// processes are those of this pid namespace. One that ends meanwhile is left out.
func processes() (map[int]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := map[int]process{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		status, err := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if err != nil {
			continue
		}
		var p process
		for line := range strings.Lines(string(status)) {
			if value, ok := strings.CutPrefix(line, "PPid:"); ok {
				p.parent, _ = strconv.Atoi(strings.TrimSpace(value))
			}
		}
		// A zombie has none and needs no killing.
		if p.exe, err = os.Readlink(filepath.Join("/proc", e.Name(), "exe")); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		all[pid] = p
	}
	return all, nil
}

// below says whether a process is the program or descends from it.
func below(pid int, all map[int]process, exe string) bool {
	for ; pid > 1; pid = all[pid].parent {
		if all[pid].exe == exe {
			return true
		}
	}
	return false
}
