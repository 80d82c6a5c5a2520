// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	// interval is the time between two searches for copies that are not used.
	interval = time.Minute
	// grace is how long no spec must have named a copy: a runtime may still be making a
	// container from the spec that was there before, for which the kubelet waits two
	// minutes.
	grace = 5 * time.Minute
)

// KeepClean removes copies that are not used any more, until ctx ends. named returns the
// paths that specs name.
func (f *Folder) KeepClean(ctx context.Context, named func() (map[string]bool, error)) {
	var problem logchange.Problem
	for {
		problem.Log(ctx, f.sweep(ctx, named), "Cannot remove copies of hook programs that are not used", "")
		if err := wait.For(ctx, interval); err != nil {
			return
		}
	}
}

// sweep removes copies that were unused for a while.
func (f *Folder) sweep(ctx context.Context, named func() (map[string]bool, error)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	present, err := f.others()
	if err != nil || len(present) == 0 {
		return err
	}
	folder := f.folderLock()
	if locked, err := folder.TryLock(); err != nil || !locked {
		return err // another process installs or removes: next time
	}
	unused, err := f.findUnused(present, named)
	if err == nil {
		err = f.removeOld(ctx, unused)
	}
	return errors.Join(err, folder.Unlock())
}

// others returns the copies that this process has not installed.
func (f *Folder) others() ([]string, error) {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return nil, fmt.Errorf("folder for hook programs: %w", err)
	}
	var paths []string
	for _, entry := range entries {
		if path := filepath.Join(f.path, entry.Name()); copyName.MatchString(entry.Name()) && f.held[path] == nil {
			paths = append(paths, path)
		}
	}
	for _, path := range f.earlier {
		if _, err := os.Lstat(path); err == nil {
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// findUnused returns those that no process holds and no spec names. They are locked
// before the specs are read: a process that ends in between has written its last spec.
func (f *Folder) findUnused(paths []string, named func() (map[string]bool, error)) ([]string, error) {
	var free []string
	for _, path := range paths {
		file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, fmt.Errorf("hook program: %w", err)
		}
		defer func() { _ = file.Close() }()
		switch err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case errors.Is(err, unix.EWOULDBLOCK):
			continue
		case err != nil:
			return nil, fmt.Errorf("lock the hook program %s: %w", path, err)
		}
		free = append(free, path)
	}
	names, err := named()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(free, func(path string) bool { return names[path] }), nil
}

// removeOld removes what was unused in every sweep for a while.
func (f *Folder) removeOld(ctx context.Context, unused []string) error {
	maps.DeleteFunc(f.unused, func(path string, _ time.Time) bool { return !slices.Contains(unused, path) })
	var errs []error
	for _, path := range unused {
		since, seen := f.unused[path]
		if !seen {
			f.unused[path] = time.Now()
			continue
		}
		if time.Since(since) < grace {
			continue
		}
		if err := host.RemoveFile(path); err != nil {
			errs = append(errs, fmt.Errorf("hook program: %w", err))
			continue
		}
		delete(f.unused, path)
		klog.FromContext(ctx).Info("Removed a hook program that no CDI spec names any more", "path", path)
	}
	return errors.Join(errs...)
}
