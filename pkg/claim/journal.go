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

// journal keeps the records, one file per claim. Whoever reads or writes the
// record of a claim holds that claim's lock, except for list.
type journal struct {
	dir        string
	quarantine quarantine
	// changed tells of every record that this process writes. One that goes was
	// written as Unpreparing before.
	changed notice
	// replace and remove are host.ReplaceFile and host.RemoveFile.
	replace func(path string, data []byte, mode fs.FileMode) error
	remove  func(path string) error
}

func newJournal(dir, quarantined string) (*journal, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	return &journal{
		dir: dir, replace: host.ReplaceFile, remove: host.RemoveFile,
		quarantine: quarantine{dir: quarantined, move: os.Rename, remove: host.RemoveFile},
	}, nil
}

func (j *journal) path(uid types.UID) string { return filepath.Join(j.dir, string(uid)+recordSuffix) }

// read returns nil for a claim without record. It changes nothing.
func (j *journal) read(uid types.UID) (*Record, error) {
	data, err := os.ReadFile(j.path(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	record, err := parseRecord(data, uid)
	if err != nil {
		return nil, &unreadableError{path: j.path(uid), err: err}
	}
	return record, nil
}

// unreadableError is a file whose content is not a record of this version.
type unreadableError struct {
	path string
	err  error
}

func (e *unreadableError) Error() string { return fmt.Sprintf("journal file %s: %v", e.path, e.err) }

func (e *unreadableError) Unwrap() error { return e.err }

// load is read for those who hold the claim's lock: a file that makes no sense
// goes to the quarantine and is reported as a *CorruptError, once. One of another
// version stays.
func (j *journal) load(ctx context.Context, uid types.UID, boot string) (*Record, error) {
	record, err := j.read(uid)
	var unreadable *unreadableError
	if !errors.As(err, &unreadable) || errors.Is(err, errOtherVersion) {
		return record, err
	}
	path, moveErr := j.quarantine.put(j.path(uid), uid, boot)
	if moveErr != nil {
		return nil, fmt.Errorf("journal of claim %s is damaged (%w) and cannot be set aside: %w", uid, err, moveErr)
	}
	corrupt := &CorruptError{UID: uid, Path: path, Err: unreadable.err}
	klog.FromContext(ctx).Error(corrupt, "Damaged journal file set aside", "claimUID", uid, "path", path)
	return nil, corrupt
}

func (j *journal) save(r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = j.replace(j.path(r.Claim.UID), append(data, '\n'), recordMode)
	}
	if err != nil {
		return fmt.Errorf("journal of claim %s: %w", r.Claim.UID, err)
	}
	j.changed.tell()
	return nil
}

// delete succeeds for a claim without record.
func (j *journal) delete(uid types.UID) error {
	if err := j.remove(j.path(uid)); err != nil {
		return fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	return nil
}

// list returns all records that can be read, and the paths of the other files:
// what their claims have is not known here. It takes no lock: a record is
// replaced in one piece, and a partition comes or goes only under its GPU's lock
// and while a record says so.
func (j *journal) list() (records []*Record, unreadable []string, err error) {
	uids, err := j.uids()
	if err != nil {
		return nil, nil, err
	}
	for _, uid := range uids {
		record, err := j.read(uid)
		switch {
		case err != nil:
			unreadable = append(unreadable, j.path(uid))
		case record != nil:
			records = append(records, record)
		}
	}
	return records, unreadable, nil
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
