// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/partage-dev/partage/pkg/node/podcgroup"
	"github.com/partage-dev/partage/pkg/node/process"
)

// Names of device nodes that tell GPUs, and partitions, apart. The capabilities 1 and 2
// are the rights to configure and to monitor partitions.
var (
	gpuNode       = regexp.MustCompile(`^nvidia[0-9]+$`)
	partitionNode = regexp.MustCompile(`^nvidia-cap([3-9]|[1-9][0-9]+)$`)
)

// credible returns those PIDs that may be clients of these servers: processes in pods
// that have a device node of theirs open. The daemon takes the PID of a client
// from the connection, which the client may pass on before it ends; so the PID may be
// that of a process that has nothing to do with MPS.
func credible(pids []int, servers []process.ID) []int {
	opened := map[uint64]string{}
	for _, server := range servers {
		if !server.Alive() {
			continue
		}
		// Without its nodes the server is ending, and its clients with it.
		if nodes, err := process.Devices(server.PID); err == nil {
			maps.Copy(opened, nodes)
		}
	}
	devices := distinctive(opened)
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool {
		return !process.Alive(pid) || !podcgroup.In(procfs, pid) || !process.HasDevice(pid, devices)
	})
}

// distinctive returns those of a server's nodes that its clients have open as well,
// and clients of other sessions do not. A root server may use a partition without its
// capabilities; then the GPU's node has to do.
func distinctive(opened map[uint64]string) map[uint64]bool {
	gpus, partitions := map[uint64]bool{}, map[uint64]bool{}
	for number, path := range opened {
		switch name := filepath.Base(path); {
		case gpuNode.MatchString(name):
			gpus[number] = true
		case partitionNode.MatchString(name):
			partitions[number] = true
		}
	}
	if len(partitions) > 0 {
		return partitions
	}
	return gpus
}
