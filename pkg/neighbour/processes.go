// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"fmt"
	"io/fs"
	"strconv"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/podcgroup"
)

// RunningPods lists the UIDs of the pods that have processes, by a procfs of the host.
func RunningPods(procfs fs.FS) (map[types.UID]bool, error) {
	entries, err := fs.ReadDir(procfs, ".")
	if err != nil {
		return nil, fmt.Errorf("look for the processes of pods: %w", err)
	}
	running := map[types.UID]bool{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if pod, found := podcgroup.OfProcess(procfs, pid); found {
			running[types.UID(pod.UID)] = true
		}
	}
	return running, nil
}
