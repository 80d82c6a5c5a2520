// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
)

const (
	// maxPartitions is how many partitions a GPU can have, and so how many sessions.
	maxPartitions = 7
	// unknownGPUs stands for the number of GPUs where the driver does not list them.
	unknownGPUs = 16

	mebibyte = 1 << 20
	// pipeSize has room for the handful of sockets and files that MPS makes.
	pipeSize = mebibyte
	// logSize has room for all logs, each with the end of an earlier one, and for what a
	// daemon writes between two looks at them.
	logSize = 8 * maxLog
	// minShmSize is what container runtimes give /dev/shm.
	minShmSize = 64 * mebibyte

	// fileSize is what a file takes of the kernel's memory beside its content, as Linux
	// itself reckons.
	fileSize = 1 << 10
	// A tmpfs has room for a file per 16 KiB.
	bytesPerFile      = 16 << 10
	fewest, mostFiles = 256, 1 << 18
)

// maxFiles returns how many files and folders a tmpfs of some size may have.
func maxFiles(size int64) int64 { return min(max(size/bytesPerFile, fewest), mostFiles) }

// cost returns what a tmpfs of some size can take of the node's memory.
func cost(size int64) int64 { return size + maxFiles(size)*fileSize }

// fixedCost is that of what every session has beside its /dev/shm.
func fixedCost() int64 { return cost(pipeSize) + cost(logSize) }

// memory bounds what the tmpfs of all sessions together may take of the node's
// memory. Each GPU has an equal share, and each partition a seventh of that, so that
// the size does not depend on which sessions run and never has to change.
type memory struct {
	// dir has the sessions' folders, proc is the procfs.
	dir, proc string
	// percent of the node's memory is what the tmpfs of all sessions may take together.
	percent int
	// label is the SELinux context of what is mounted, empty for none.
	label string
	// mu is held from the look at what is mounted until something new is mounted.
	mu sync.Mutex
}

// mount mounts what of a session is not mounted; running containers may have the
// rest. It fails if the session does not fit beside the others.
func (m *memory) mount(f folder, spec mps.Spec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	unmounted, err := f.mounts().unmounted()
	if len(unmounted) == 0 || err != nil {
		return err
	}
	limit, err := m.limit()
	if err != nil {
		return fmt.Errorf("session %s: %w", f.id(), err)
	}
	taken, err := m.taken(f)
	if err != nil {
		return fmt.Errorf("session %s: %w", f.id(), err)
	}
	shmSize := m.shmSize(spec, limit)
	if need := cost(shmSize) + fixedCost(); taken+need > limit {
		return fmt.Errorf("session %s: its tmpfs of %d MiB does not fit: those of other sessions have %d MiB, and all together may have %d MiB, "+
			"which is %d %% of the node's memory", f.id(), need/mebibyte, taken/mebibyte, limit/mebibyte, m.percent)
	}
	return f.mounts().mount(f.id(), shmSize, m.label)
}

// limit returns how many bytes all sessions may take together.
func (m *memory) limit() (int64, error) {
	path := filepath.Join(m.proc, "meminfo")
	file, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("read the node's memory: %w", err)
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 || fields[0] != "MemTotal:" || fields[2] != "kB" {
			continue
		}
		total, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the node's memory from %s: %w", path, err)
		}
		return total << 10 * int64(m.percent) / 100, nil
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("read the node's memory: %w", err)
	}
	return 0, fmt.Errorf("read the node's memory: no MemTotal in %s", path)
}

// shmSize returns the size of a session's /dev/shm, a multiple of the page size. All
// sessions that can run at one time fit into the limit with it, unless they get
// minShmSize.
func (m *memory) shmSize(spec mps.Spec, limit int64) int64 {
	gpus := unknownGPUs
	if entries, err := os.ReadDir(filepath.Join(m.proc, "driver/nvidia/gpus")); err == nil && len(entries) > 0 {
		gpus = len(entries)
	}
	size := limit / int64(gpus) * int64(min(len(spec.Devices), gpus))
	if strings.HasPrefix(spec.Devices[0], "MIG-") {
		size /= maxPartitions
	}
	// The files in it cost something, too.
	size = (size - fixedCost()) / (bytesPerFile + fileSize) * bytesPerFile
	return max(minShmSize, size/mebibyte*mebibyte)
}

// taken returns the size of everything that is mounted in the folders of sessions
// other than this one.
func (m *memory) taken(except folder) (int64, error) {
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return 0, fmt.Errorf("look for the tmpfs of sessions: %w", err)
	}
	var sum int64
	for _, entry := range entries {
		f := folder(filepath.Join(m.dir, entry.Name()))
		if !entry.IsDir() || !mps.ValidID(entry.Name()) || f == except {
			continue
		}
		for _, mount := range f.mounts() {
			size, err := mount.size()
			if err != nil {
				return 0, err
			}
			if size > 0 {
				sum += cost(size)
			}
		}
	}
	return sum, nil
}

// size returns the size of what is mounted, 0 if nothing is.
func (m mount) size() (int64, error) {
	mounted, err := m.mounted()
	if !mounted || err != nil {
		return 0, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(m.path, &st); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return 0, nil
		}
		return 0, fmt.Errorf("look at the size of %s: %w", m.path, err)
	}
	return int64(st.Blocks) * st.Bsize, nil
}
