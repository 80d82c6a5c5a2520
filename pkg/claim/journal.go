// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
)

const (
	recordSuffix = ".json"
	// recordMode: claim names are nobody else's business.
	recordMode = 0o600
)

// CorruptError is a journal file that could not be understood and was set aside.
// What the claim had on the hardware is not known any more.
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

// journal keeps the records, one file per claim. Whoever reads or writes the
// record of a claim holds that claim's lock, except for list.
type journal struct {
	dir string
	// replace and remove are host.ReplaceFile and host.RemoveFile.
	replace func(path string, data []byte, mode fs.FileMode) error
	remove  func(path string) error
}

func newJournal(dir string) (*journal, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	return &journal{dir: dir, replace: host.ReplaceFile, remove: host.RemoveFile}, nil
}

func (j *journal) path(uid types.UID) string { return filepath.Join(j.dir, string(uid)+recordSuffix) }

// load returns nil for a claim without record. A file that makes no sense is set
// aside and reported as a *CorruptError, once; one of another version stays.
func (j *journal) load(ctx context.Context, uid types.UID) (*Record, error) {
	path := j.path(uid)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	record, err := parseRecord(data, uid)
	if err == nil {
		return record, nil
	}
	if errors.Is(err, errOtherVersion) {
		return nil, fmt.Errorf("journal of claim %s: %s: %w", uid, path, err)
	}
	aside, moveErr := j.setAside(uid)
	if moveErr != nil {
		return nil, fmt.Errorf("journal of claim %s is damaged (%w) and cannot be set aside: %w", uid, err, moveErr)
	}
	corrupt := &CorruptError{UID: uid, Path: aside, Err: err}
	klog.FromContext(ctx).Error(corrupt, "Damaged journal file set aside", "claimUID", uid, "path", aside)
	return nil, corrupt
}

func (j *journal) asidePrefix(uid types.UID) string { return j.path(uid) + ".corrupt-" }

func (j *journal) setAside(uid types.UID) (string, error) {
	for n := 1; ; n++ {
		aside := j.asidePrefix(uid) + strconv.Itoa(n)
		if _, err := os.Lstat(aside); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		return aside, os.Rename(j.path(uid), aside)
	}
}

// wasCorrupt tells whether a record of the claim was ever set aside.
func (j *journal) wasCorrupt(uid types.UID) bool {
	_, err := os.Lstat(j.asidePrefix(uid) + "1")
	return err == nil
}

func (j *journal) save(r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = j.replace(j.path(r.Claim.UID), append(data, '\n'), recordMode)
	}
	if err != nil {
		return fmt.Errorf("journal of claim %s: %w", r.Claim.UID, err)
	}
	return nil
}

// delete succeeds for a claim without record.
func (j *journal) delete(uid types.UID) error {
	if err := j.remove(j.path(uid)); err != nil {
		return fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	return nil
}

// list returns all records that can be read. It takes no lock: a record is
// replaced in one piece, and what one says about a GPU changes only under that
// GPU's lock.
func (j *journal) list(ctx context.Context) ([]*Record, error) {
	uids, err := j.uids()
	if err != nil {
		return nil, err
	}
	var records []*Record
	for _, uid := range uids {
		data, err := os.ReadFile(j.path(uid))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var record *Record
		if err == nil {
			record, err = parseRecord(data, uid)
		}
		if err != nil {
			// Setting it aside takes the claim's lock, see Resume.
			klog.FromContext(ctx).Error(err, "Ignoring an unreadable journal file", "claimUID", uid)
			continue
		}
		records = append(records, record)
	}
	return records, nil
}

// uids lists the claims that have a record, or the beginning of one that a
// killed process left.
func (j *journal) uids() ([]types.UID, error) {
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	var uids []types.UID
	for _, entry := range entries {
		name := entry.Name()
		if unfinished, ok := strings.CutSuffix(name, recordSuffix+".tmp"); ok {
			name = strings.TrimPrefix(unfinished, ".") + recordSuffix
		}
		uid, ok := strings.CutSuffix(name, recordSuffix)
		if ok && checkUID(types.UID(uid)) == nil {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

var uidText = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z-]{0,62}$`)

// checkUID keeps a UID from becoming another path.
func checkUID(uid types.UID) error {
	if !uidText.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: want letters, digits and dashes", uid)
	}
	return nil
}
