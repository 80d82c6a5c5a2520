// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gofrs/flock"

	"github.com/partage-dev/partage/pkg/host"
)

const hookMode = 0o755

// installHook copies a hook program to a path that exists on the host too, because
// the container runtime runs hooks outside the driver's container. An identical copy
// is left alone; a different one is replaced atomically, since a container may be
// starting right now.
func installHook(from, to string) (err error) {
	want, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("read the hook program: %w", err)
	}
	// Two instances may start at the same time on a node that has no copy yet. The
	// lock is on the folder itself, so that it leaves no file behind.
	lock := flock.New(filepath.Dir(to), flock.SetFlag(os.O_RDONLY))
	if err := lock.Lock(); err != nil {
		return fmt.Errorf("wait for another instance that installs hook programs: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()

	have, err := os.ReadFile(to)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the installed hook program: %w", err)
	}
	if err == nil && bytes.Equal(have, want) {
		info, err := os.Stat(to)
		if err == nil && info.Mode().Perm() == hookMode {
			return removeUnfinished(to)
		}
	}
	if err := host.ReplaceFile(to, want, hookMode); err != nil {
		return fmt.Errorf("install the hook program %s: %w", from, err)
	}
	return nil
}

// removeUnfinished removes the partial copy of an instance that was killed. The caller
// holds the lock.
func removeUnfinished(path string) error {
	if err := os.Remove(host.TemporaryName(path)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove an unfinished copy of a hook program: %w", err)
	}
	return nil
}
