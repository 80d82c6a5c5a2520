// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
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
	// daemon writes between two checks of them.
	logSize = 8 * maxLog
	// minShmSize is what container runtimes give /dev/shm.
	minShmSize = 64 * mebibyte
)

// fixedCost is that of what every session has beside its /dev/shm.
func fixedCost() int64 { return host.TmpfsCost(pipeSize) + host.TmpfsCost(logSize) }

// nodeMemory returns how many bytes of memory the node has.
func nodeMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("read the node's memory: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// shmSize returns the size of a session's /dev/shm, a multiple of the page size. limit is what the tmpfs of all sessions together
// may take of the node's memory, and proc its procfs. Each GPU has an equal share of that, and each partition a seventh of its
// GPU's: so the size depends on the hardware alone and never has to change, and all sessions that can run at one time fit,
// unless they get minShmSize.
func shmSize(spec mps.Spec, limit int64, proc string) int64 {
	gpus := unknownGPUs
	if entries, err := os.ReadDir(filepath.Join(proc, "driver/nvidia/gpus")); err == nil && len(entries) > 0 {
		gpus = len(entries)
	}
	size := limit / int64(gpus) * int64(min(len(spec.Devices), gpus))
	if strings.HasPrefix(spec.Devices[0], "MIG-") {
		size /= maxPartitions
	}
	// The files in it cost a sixteenth, too.
	size = (size - fixedCost()) / 17 * 16
	return max(minShmSize, size/mebibyte*mebibyte)
}
