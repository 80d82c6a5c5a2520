// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"
)

const suffix = ".lock"

func (l *Locks) path(n name) string { return filepath.Join(l.dir, n.file+suffix) }

// lockFiles takes all files or none, and returns the one that another process holds.
func (l *Locks) lockFiles(names []name) (files []*flock.Flock, held *name, err error) {
	for i, n := range names {
		file := flock.New(l.path(n))
		locked, err := lockPresent(file)
		if err == nil && locked {
			files = append(files, file)
			continue
		}
		for j, locked := range files {
			unlock(names[j], locked)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("lock of %s: %w", n.text, err)
		}
		return nil, &names[i], nil
	}
	return files, nil, nil
}

// lockPresent locks a file and makes sure that it is still the one that others
// would open: its last holder may have removed it in between.
func lockPresent(file *flock.Flock) (bool, error) {
	for {
		if locked, err := file.TryLock(); err != nil || !locked {
			return false, err
		}
		held, err := file.Stat()
		if err != nil {
			return false, errors.Join(err, file.Unlock())
		}
		present, err := os.Stat(file.Path())
		if err == nil && os.SameFile(held, present) {
			return true, nil
		}
		if unlockErr := file.Unlock(); unlockErr != nil || (err != nil && !errors.Is(err, fs.ErrNotExist)) {
			return false, errors.Join(err, unlockErr)
		}
	}
}

func unlock(n name, file *flock.Flock) {
	if n.transient() {
		// Left behind, it is an empty file that Sweep takes away.
		_ = os.Remove(file.Path())
	}
	// It fails for a bad descriptor only, which holds no lock either.
	_ = file.Unlock()
}

// Sweep removes the lock files that killed processes left.
func (l *Locks) Sweep() error {
	files, err := filepath.Glob(filepath.Join(l.dir, claimPrefix+"*"+suffix))
	if err != nil {
		return err
	}
	for _, file := range files {
		uid := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), claimPrefix), suffix)
		release, err := l.TryClaim(types.UID(uid))
		if err != nil {
			return err
		}
		if release != nil {
			release()
		}
	}
	return nil
}
