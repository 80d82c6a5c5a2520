// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// CorruptError is a journal file that could not be understood and was moved to
// the quarantine. What the claim had on the hardware is not known any more.
type CorruptError struct {
	UID types.UID
	// Path is where the file is now.
	Path string
	Err  error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("the journal of claim %s was damaged and is now %s; partitions of the claim may be left behind: %v", e.UID, e.Path, e.Err)
}

func (e *CorruptError) Unwrap() error { return e.Err }

// quarantine keeps damaged journal files for people, in one folder per boot.
// Those of another boot are about partitions that do not exist any more.
// Whoever touches the files of a claim holds that claim's lock.
type quarantine struct {
	dir   string
	files Files
}

// put moves a file here. It never replaces another one.
func (q *quarantine) put(path string, uid types.UID, boot string) (string, error) {
	folder := filepath.Join(q.dir, boot)
	if err := os.MkdirAll(folder, folderMode); err != nil {
		return "", err
	}
	to := filepath.Join(folder, string(uid)+recordSuffix)
	for n := 2; ; n++ {
		_, err := os.Lstat(to)
		if errors.Is(err, fs.ErrNotExist) {
			return to, q.files.Move(path, to)
		}
		if err != nil {
			return "", err
		}
		to = filepath.Join(folder, string(uid)+recordSuffix+"-"+strconv.Itoa(n))
	}
}

// list returns all files of a boot.
func (q *quarantine) list(boot string) ([]string, error) {
	folder := filepath.Join(q.dir, boot)
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("quarantine: %w", err)
	}
	var paths []string
	for _, entry := range entries {
		paths = append(paths, filepath.Join(folder, entry.Name()))
	}
	return paths, nil
}

func (q *quarantine) of(uid types.UID, boot string) ([]string, error) {
	all, err := q.list(boot)
	var own []string
	for _, path := range all {
		if quarantinedUID(path) == uid {
			own = append(own, path)
		}
	}
	return own, err
}

// quarantinedUID returns the claim that a file in the quarantine was about.
func quarantinedUID(path string) types.UID {
	uid, _, _ := strings.Cut(filepath.Base(path), recordSuffix)
	return types.UID(uid)
}

// Quarantined returns the damaged files of a claim in this boot.
func (s *Store) Quarantined(uid types.UID) ([]string, error) { return s.quarantine.of(uid, s.boot) }

// QuarantinedNames reports whether the damaged files of a claim name all devices of a
// record, so that nothing but these can be left of what they were about.
func (s *Store) QuarantinedNames(uid types.UID, r *Record) bool {
	paths, err := s.Quarantined(uid)
	if err != nil {
		return false
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil || len(deviceField.FindAllIndex(data, -1)) != len(r.Devices) {
			return false
		}
		for i := range r.Devices {
			if !strings.Contains(string(data), `"`+r.Devices[i].Device+`"`) {
				return false
			}
		}
	}
	return true
}

// DropQuarantined removes the damaged files of a claim: all that it has is written
// down again, or nothing of it is left.
func (s *Store) DropQuarantined(uid types.UID) error {
	paths, err := s.Quarantined(uid)
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := s.files.Remove(path); err != nil {
			return fmt.Errorf("quarantine: %w", err)
		}
	}
	if len(paths) > 0 {
		s.changed.send()
	}
	return nil
}
