// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi/edit"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/host"
)

// SoftLimits are what an interposer library needs to hold the containers of claims to
// their limits: a folder for each claim, which is in no other claim's containers.
type SoftLimits struct {
	// Dir has the folders of all claims.
	Dir string
	// Library is its path on the host, empty where there is none.
	Library string
	Files   LimitFiles
}

// LimitFiles makes and removes the folders of claims. Tests strike here.
type LimitFiles interface {
	// Mount makes a folder that containers cannot fill beyond a bound. One that is
	// mounted already stays.
	Mount(path string) error
	// Remove succeeds when there is no such folder. What it does not get to in time is for SoftLimits.Sweep.
	Remove(ctx context.Context, path string) error
}

// fillLimits makes the folder of a claim with devices that an interposer library limits. Containers write to it, so that
// it is a file system of its own: a tenant must not be able to fill the disk that the records are on.
func (k *Specs) fillLimits(r *record.Record) error {
	if err := k.Limits.Files.Mount(k.Limits.folder(r.Claim.UID)); err != nil {
		return err
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if !d.Limited() {
			continue
		}
		layout := k.interposer(r, d)
		for _, dir := range []string{layout.CacheDir(), layout.LocksDir()} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			// The library writes as whatever user the container has. The mode is set past the umask.
			if err := os.Chmod(dir, os.ModeSticky|0o777); err != nil {
				return err
			}
		}
		// The file is there already where a tenant may have filled the folder.
		if present, err := os.ReadFile(layout.PreloadPath()); err == nil && string(present) == edit.PreloadText {
			continue
		}
		if err := host.ReplaceUnsynced(layout.PreloadPath(), []byte(edit.PreloadText), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (l SoftLimits) folder(uid types.UID) string { return filepath.Join(l.Dir, string(uid)) }

// List returns the claims that have a folder.
func (l SoftLimits) List() ([]types.UID, error) {
	files, err := os.ReadDir(l.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("folders for software limits: %w", err)
	}
	var uids []types.UID
	for _, file := range files {
		if record.CheckUID(types.UID(file.Name())) == nil {
			uids = append(uids, types.UID(file.Name()))
		}
	}
	return uids, nil
}

// removeTime bounds how long the release of a claim waits for its files to go. In memory
// they go with their file system; what an earlier version had on a disk is left to Sweep.
const removeTime = 2 * time.Second

// Drop removes the folder of a claim. None is a success.
func (l SoftLimits) Drop(uid types.UID) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	if err := l.Files.Remove(ctx, l.folder(uid)); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("folder for software limits: %w", err)
	}
	return nil
}

// Sweep removes what was left of folders that were dropped.
func (l SoftLimits) Sweep(ctx context.Context) error {
	if err := host.RemoveAside(ctx, l.Dir); err != nil {
		return fmt.Errorf("folders for software limits: %w", err)
	}
	return nil
}

// OSLimitFiles are folders on this machine.
type OSLimitFiles struct {
	// Context is the SELinux context of what is mounted, empty for none.
	Context string
}

var _ LimitFiles = OSLimitFiles{}

// limitsBytes is room for the counters of many devices; the library's take about a
// megabyte each.
const limitsBytes = 16 << 20

// Mount implements LimitFiles.
func (f OSLimitFiles) Mount(path string) error { return host.MountTmpfs(path, limitsBytes, f.Context) }

// Remove implements LimitFiles.
func (OSLimitFiles) Remove(ctx context.Context, path string) error {
	return host.RemoveTmpfs(ctx, path)
}
