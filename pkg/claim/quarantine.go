// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

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
	dir string
	// move and remove are os.Rename and host.RemoveFile.
	move   func(from, to string) error
	remove func(path string) error
}

// put moves a file here. It never replaces another one.
func (q *quarantine) put(path string, uid types.UID, boot string) (string, error) {
	folder := filepath.Join(q.dir, boot)
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return "", err
	}
	to := filepath.Join(folder, string(uid)+recordSuffix)
	for n := 2; ; n++ {
		_, err := os.Lstat(to)
		if errors.Is(err, fs.ErrNotExist) {
			return to, q.move(path, to)
		}
		if err != nil {
			return "", err
		}
		to = filepath.Join(folder, string(uid)+recordSuffix+"-"+strconv.Itoa(n))
	}
}

// files lists all files of a boot.
func (q *quarantine) files(boot string) ([]string, error) {
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

// of lists the files of a claim.
func (q *quarantine) of(uid types.UID, boot string) ([]string, error) {
	all, err := q.files(boot)
	var own []string
	for _, path := range all {
		if strings.HasPrefix(filepath.Base(path), string(uid)+recordSuffix) {
			own = append(own, path)
		}
	}
	return own, err
}

// drop removes the files of a claim: all that it has is written down again.
func (q *quarantine) drop(uid types.UID, boot string) error {
	paths, err := q.of(uid, boot)
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := q.remove(path); err != nil {
			return fmt.Errorf("quarantine: %w", err)
		}
	}
	return nil
}
