// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/wait"
)

// Openers lists the processes that have a device node open, for example "/dev/nvidia0",
// by its number: containers have nodes of their own. Processes that end meanwhile are
// passed over. It sees all processes only where the proc root is that of the host.
//
// A process may have a file of a server that does not answer, and then nobody can tell
// whether that is the node. That is an error, too.
func (r Roots) Openers(path string) ([]int, error) {
	pids, err := looks.Do(r.Complete().Proc+" "+path, lookLimit, func() ([]int, error) { return r.openers(path) })
	if errors.Is(err, wait.ErrNoAnswer) {
		return nil, fmt.Errorf("find out who has %s open: a file that a process of this node has open does not answer within %s", path, lookLimit)
	}
	return slices.Clone(pids), err
}

// lookLimit is how long a look at the open files of all processes may take.
const lookLimit = 10 * time.Second

var looks wait.Looks[string, []int]

func (r Roots) openers(path string) ([]int, error) {
	major, minor, err := r.CharDevice(path)
	if err != nil {
		return nil, err
	}
	number := unix.Mkdev(uint32(major), uint32(minor))
	files, err := filepath.Glob(filepath.Join(r.Complete().Proc, "[0-9]*", "fd", "*"))
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, file := range files {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(file))))
		if err != nil || pid == os.Getpid() {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(file, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == number {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}
