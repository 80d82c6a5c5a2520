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

// LimitFiles makes the folders of claims. Tests strike here.
type LimitFiles interface {
	// Mount makes a folder that containers cannot fill beyond a bound. One that is
	// mounted already stays.
	Mount(path string) error
	// MakeDir makes a folder in it that any user can write to.
	MakeDir(path string) error
	Write(path string, data []byte, mode fs.FileMode) error
	// Remove succeeds when there is no such folder.
	Remove(path string) error
}

// makeLimits makes the folder of a claim with devices that an interposer library limits. Containers write to it, so that
// it is a file system of its own: a tenant must not be able to fill the disk that the records are on. What an earlier
// boot left is about processes that are gone.
func (k *Specs) makeLimits(r *record.Record, first bool) error {
	if k.Limits.Library == "" {
		return edit.ErrNoInterposer
	}
	if first {
		if err := k.Limits.Drop(r.Claim.UID); err != nil {
			return err
		}
	}
	if err := k.fillLimits(k.Limits.Folder(r.Claim.UID), r); err != nil {
		return fmt.Errorf("folder for software limits: %w", err)
	}
	return nil
}

func (k *Specs) fillLimits(folder string, r *record.Record) error {
	if err := k.Limits.Files.Mount(folder); err != nil {
		return err
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if !d.Shared().Limited {
			continue
		}
		layout := k.interposer(r, d)
		for _, dir := range []string{layout.CacheDir(), layout.LocksDir()} {
			if err := k.Limits.Files.MakeDir(dir); err != nil {
				return err
			}
		}
		// Containers may be running with the file that is there.
		present, err := os.ReadFile(layout.PreloadPath())
		if err == nil && string(present) == edit.PreloadText {
			continue
		}
		if err := k.Limits.Files.Write(layout.PreloadPath(), []byte(edit.PreloadText), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Folder returns the folder of a claim.
func (l SoftLimits) Folder(uid types.UID) string { return filepath.Join(l.Dir, string(uid)) }

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

// Drop removes the folder of a claim. None is a success.
func (l SoftLimits) Drop(uid types.UID) error {
	if err := l.Files.Remove(l.Folder(uid)); err != nil {
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

// limitsBytes is room for the counters of many devices; the library's take about a
// megabyte each.
const limitsBytes = 16 << 20

// OSLimitFiles makes folders on this machine.
type OSLimitFiles struct {
	// Context is the SELinux context of what it mounts, empty for none.
	Context string
}

var _ LimitFiles = OSLimitFiles{}

// Mount implements LimitFiles.
func (f OSLimitFiles) Mount(path string) error {
	return host.MountTmpfs(path, limitsBytes, f.Context)
}

// MakeDir implements LimitFiles. The library writes as whatever user the container has.
func (OSLimitFiles) MakeDir(path string) error {
	const all = os.ModeSticky | 0o777
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	return os.Chmod(path, all) // past the umask
}

// Write implements LimitFiles. Running containers keep the file that they have.
func (OSLimitFiles) Write(path string, data []byte, mode fs.FileMode) error {
	return host.ReplaceUnsynced(path, data, mode)
}

// removeTime bounds how long the release of a claim waits for its files to go. In memory
// they go with their file system; what an earlier version had on a disk is left to Sweep.
const removeTime = 2 * time.Second

// Remove implements LimitFiles.
func (OSLimitFiles) Remove(path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	err := host.RemoveTmpfs(ctx, path)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil // it is moved aside
	}
	return err
}
