// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/partage-dev/partage/pkg/host"
)

// mount is a tmpfs of a session. Its clients can write to it, or make the daemon do so,
// and must not be able to fill a file system of the host.
type mount struct {
	path, mode string
	// bytes is 0 for the one that has the rest of the session's memory.
	bytes int64
	// shared: running containers have it.
	shared bool
}

// mounts are those of a session.
type mounts []mount

func (f folder) mounts() mounts {
	return mounts{
		{path: f.pipe(), mode: "755", bytes: pipeSize, shared: true},
		{path: string(f.logs()), mode: "755", bytes: logSize},
		{path: f.shm(), mode: "1777", shared: true},
	}
}

// mount mounts what is not mounted: running containers may have the rest. label is
// the SELinux context of that, empty for none.
func (all mounts) mount(session string, shmSize int64, label string) error {
	for _, m := range all {
		mounted, err := host.IsMountPoint(m.path)
		if err == nil && !mounted {
			size := cmp.Or(m.bytes, shmSize)
			options := fmt.Sprintf("mode=%s,size=%d,nr_inodes=%d", m.mode, size, maxFiles(size))
			err = host.Tmpfs("partage-mps-"+session, m.path, options, label)
		}
		if err != nil {
			return fmt.Errorf("mount a tmpfs of session %s at %s: %w", session, m.path, err)
		}
	}
	return nil
}

// lost returns the paths at which containers have what is not mounted here any more.
func (all mounts) lost() (paths []string, err error) {
	for _, m := range all {
		if !m.shared {
			continue
		}
		mounted, err := host.IsMountPoint(m.path)
		if err != nil {
			return nil, err
		}
		if !mounted {
			paths = append(paths, m.path)
		}
	}
	return paths, nil
}

// remove empties and unmounts everything. Containers keep their mounts, with next to nothing in them.
func (all mounts) remove() error {
	var errs []error
	for _, m := range all {
		errs = append(errs, host.RemoveTmpfs(m.path))
	}
	return errors.Join(errs...)
}
