// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metadatafiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// minAge is how old something must be that is taken for a leftover. It is longer than any call
// takes that writes it.
const minAge = time.Minute

// Claims say what has to be there.
type Claims struct {
	// Recorded are all claims of which anything is known, in whatever state.
	Recorded map[types.UID]bool
	// Prepared are those that containers may be started with.
	Prepared map[types.UID]bool
}

// Sweep removes what is left of claims that are not known any more, as when they were released
// while this was switched off, and makes the CDI specs of prepared claims again that are
// missing. It asks for the claims after it has looked at the files.
func (f *Files) Sweep(now time.Time, claims func() (Claims, error)) error {
	names, err := f.copies()
	if err != nil {
		return err
	}
	known, err := claims()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		uid := f.claimOf(name)
		var err error
		switch {
		case known.Prepared[uid]:
			err = f.restore(name)
		case !known.Recorded[uid] && isOld(f.copyOf(name), now):
			err = f.removeSpec(name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("device metadata of claim %s: %w", uid, err))
		}
	}
	return errors.Join(append(errs, f.sweepFiles(now))...)
}

// claimOf returns the claim in the name of a spec: "DRIVER_metadata_UID_REQUEST.json".
func (f *Files) claimOf(name string) types.UID {
	uid, _, _ := strings.Cut(strings.TrimPrefix(name, f.DriverName+"_metadata_"), "_")
	return types.UID(uid)
}

// sweepFiles removes what no spec mounts: the files of a claim are written first.
func (f *Files) sweepFiles(now time.Time) error {
	mounted, err := f.mountedByOthers("")
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(f.DataDir, metadataDir, "*", "*", "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range []string{f.CDIDir, filepath.Join(f.DataDir, copiesDir)} {
		// Of a process that was killed while it wrote.
		unfinished, err := filepath.Glob(filepath.Join(dir, temporaryName(f.DriverName+"_metadata_*")))
		errs = append(errs, err)
		for _, path := range unfinished {
			if isOld(path, now) {
				errs = append(errs, ignoreAbsent(os.Remove(path)))
			}
		}
	}
	for _, path := range files {
		if !mounted[path] && isOld(path, now) {
			errs = append(errs, f.removeFile(path))
		}
	}
	return errors.Join(append(errs, f.sweepFolders(now))...)
}

// sweepFolders removes what is left of a process that was killed between making the folders of a
// claim and writing the file.
func (f *Files) sweepFolders(now time.Time) error {
	var errs []error
	for _, pattern := range []string{filepath.Join("*", "*"), "*"} {
		found, err := filepath.Glob(filepath.Join(f.DataDir, metadataDir, pattern))
		errs = append(errs, err)
		for _, path := range found {
			if info, err := os.Lstat(path); err == nil && info.IsDir() && isOld(path, now) {
				errs = append(errs, f.removeFolders(path))
			}
		}
	}
	return errors.Join(errs...)
}

// isOld reports whether a file was last written long ago.
func isOld(path string, now time.Time) bool {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	return err == nil && now.Sub(info.ModTime()) >= minAge
}
