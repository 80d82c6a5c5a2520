// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// shmMode lets all users of containers in.
const shmMode = os.ModeSticky | 0o777

// mount mounts the file systems in memory of a session: its clients can write to them, or make the daemon do so, and must not be able
// to fill one of the host. What is mounted stays: running containers may have it, and the memory may be that of an earlier session.
// label is the SELinux context, empty for none.
func (f folder) mount(shmSize int64, label string) error {
	for path, bytes := range map[string]int64{f.pipe(): pipeSize, string(f.logs()): logSize, string(f.memory()): shmSize} {
		if err := host.MountTmpfs("partage-mps-"+f.id(), path, bytes, label); err != nil {
			return fmt.Errorf("session %s: %w", f.id(), err)
		}
	}
	return makeFolder(f.memory().shm(), shmMode)
}

// lost returns the paths at which containers have what is not mounted here any more.
func (f folder) lost() (paths []string, err error) {
	for _, path := range []string{f.pipe(), string(f.memory())} {
		mounted, err := host.IsMountPoint(path)
		if err != nil {
			return nil, err
		}
		if !mounted {
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// unmount unmounts everything as it is, but for memory that is kept. Containers keep their mounts.
func (f folder) unmount(kept bool) error {
	err := errors.Join(host.Unmount(f.pipe()), host.Unmount(string(f.logs())))
	if !kept {
		err = errors.Join(err, host.Unmount(string(f.memory())))
	}
	return err
}

// memory is the file system of which clients have a folder as their /dev/shm.
type memory string

func (m memory) shm() string { return filepath.Join(string(m), "shm") }

// isNeeded reports whether clients need it: clients open there what drivers have named before the first client comes.
// Otherwise no container gets a folder that others can write.
func (m memory) isNeeded() (bool, error) {
	entries, err := os.ReadDir(m.shm())
	if err != nil {
		return false, fmt.Errorf("find the server's shared memory: %w", err)
	}
	return len(entries) > 0, nil
}

// empty removes what clients have put into the memory of a session that has ended, and reports whether somebody keeps something of it
// all the same. Then it has to stay mounted for the next session of the device, so that what is kept of all of them is no more
// than one may have: it has room for the rest.
func (m memory) empty(ctx context.Context, limit time.Duration) (kept bool, err error) {
	mounted, err := host.IsMountPoint(string(m))
	if !mounted || err != nil {
		return false, err
	}
	// A process that still has it open must have no part in that of the next session.
	if err := os.Rename(m.shm(), filepath.Join(string(m), rand.Text())); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("empty the memory of a session: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, limit) // the mounts of what has just ended may go a moment later
	defer cancel()
	err = wait.Until(limited, func() (bool, error) {
		kept, err := host.EmptyTmpfs(limited, string(m))
		return !kept, err
	})
	if err == nil || ctx.Err() != nil {
		return false, err
	}
	klog.FromContext(ctx).Error(err, "Somebody keeps memory of an MPS session that has ended", "folder", string(m))
	return limited.Err() != nil, nil
}

// leftoverIntervals is how many intervals old what is left over is at least.
const leftoverIntervals = 10

// removeLeftover removes what ended containers left in the /dev/shm of a session.
func (s *Supervisor) removeLeftover(ctx context.Context, f folder) error {
	shm := f.memory().shm()
	// A client that was root may have taken it for itself.
	switch err := cmp.Or(os.Lchown(shm, 0, 0), os.Chmod(shm, shmMode)); {
	case errors.Is(err, os.ErrNotExist):
		return nil // it is being made, or removed
	case err != nil:
		return err
	}
	removed, err := host.RemoveUnused(ctx, shm, time.Now().Add(-leftoverIntervals*s.options.LeftoverInterval))
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed what ended containers left in /dev/shm", "session", f.id(), "files", removed)
	}
	return err
}
