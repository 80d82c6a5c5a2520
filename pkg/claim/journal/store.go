// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

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

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

const (
	recordSuffix = ".json"
	// recordMode: claim names are nobody else's business.
	recordMode = 0o600
	folderMode = 0o750
)

// Store keeps the records of one node. Reading or writing the record of a claim
// requires that claim's lock, except in Snapshot and UIDs.
type Store struct {
	dir, boot  string
	files      Files
	quarantine quarantine
	tombstones tombstones
	changed    broadcast
}

// Open makes the folders that are missing below the data folder. Damaged records that
// an earlier boot has left are set aside: nothing that they were about exists.
func Open(ctx context.Context, dataDir, boot string, files Files) (*Store, error) {
	s := newStore(dataDir, boot, files)
	for _, dir := range []string{s.dir, s.tombstones.dir} {
		if err := os.MkdirAll(dir, folderMode); err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
	}
	if err := s.enterBoot(ctx); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	return s, nil
}

func newStore(dataDir, boot string, files Files) *Store {
	return &Store{
		dir: filepath.Join(dataDir, "claims"), boot: boot, files: files,
		quarantine: quarantine{dir: filepath.Join(dataDir, "quarantine"), files: files},
		tombstones: tombstones{dir: filepath.Join(dataDir, "released"), boot: boot, files: files},
	}
}

// Look reads all records for a program that is not the driver. It changes nothing, and
// takes a data folder that is not there for an empty one.
func Look(dataDir, boot string) (*Snapshot, error) {
	s := newStore(dataDir, boot, OS{})
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return &Snapshot{}, nil
	}
	return s.Snapshot()
}

// Boot returns the boot that the store was opened in.
func (s *Store) Boot() string { return s.boot }

// Path returns where the record of a claim is.
func (s *Store) Path(uid types.UID) string { return filepath.Join(s.dir, string(uid)+recordSuffix) }

// Read returns the record of a claim, or nil if there is none. The state of one that is older
// than its claim's tombstone is Unpreparing, see Bury. Read changes nothing. The error is an *UnreadableError where the content is not a record of this version.
func (s *Store) Read(uid types.UID) (*Record, error) {
	data, err := os.ReadFile(s.Path(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	record, err := Parse(data, uid)
	if err != nil {
		return nil, &UnreadableError{Path: s.Path(uid), Err: err, scope: salvage(data)}
	}
	releasing, err := s.isReleasing(record)
	if err != nil {
		return nil, err
	}
	if releasing {
		record.State = Unpreparing
	}
	return record, nil
}

// UnreadableError is a file whose content is not a record of this version.
type UnreadableError struct {
	Path string
	Err  error

	scope scope
}

func (e *UnreadableError) Error() string { return fmt.Sprintf("journal file %s: %v", e.Path, e.Err) }

func (e *UnreadableError) Unwrap() error { return e.Err }

// Load is Read for those who hold the claim's lock: a damaged file goes to the
// quarantine and is reported as a *CorruptError, once. One of another version stays.
func (s *Store) Load(ctx context.Context, uid types.UID) (*Record, error) {
	record, err := s.Read(uid)
	var unreadable *UnreadableError
	if !errors.As(err, &unreadable) || errors.Is(err, ErrOtherVersion) {
		return record, err
	}
	path, moveErr := s.quarantine.put(s.Path(uid), uid, s.boot)
	if moveErr != nil {
		return nil, fmt.Errorf("journal of claim %s is damaged (%w) and cannot be set aside: %w", uid, err, moveErr)
	}
	corrupt := &CorruptError{UID: uid, Path: path, Err: unreadable.Err}
	klog.FromContext(ctx).Error(corrupt, "Damaged journal file set aside", "claimUID", uid, "path", path)
	return nil, corrupt
}

// Save writes a record: from then on all processes of this boot read it. After a power loss
// it may be damaged or an earlier one, which is of no consequence in another boot.
func (s *Store) Save(r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = s.files.Replace(s.Path(r.Claim.UID), append(data, '\n'), recordMode)
	}
	if err != nil {
		return fmt.Errorf("journal of claim %s: %w", r.Claim.UID, err)
	}
	s.changed.send()
	return nil
}

// Delete succeeds for a claim without record. It needs no space on the disk.
func (s *Store) Delete(uid types.UID) error {
	if err := s.files.Remove(s.Path(uid)); err != nil {
		return fmt.Errorf("journal of claim %s: %w", uid, err)
	}
	s.changed.send()
	return nil
}

// Changed returns a channel that the next change by this process closes.
func (s *Store) Changed() <-chan struct{} { return s.changed.receive() }

// UIDs lists the claims that have a record, or the beginning of one that a killed
// process left.
func (s *Store) UIDs() ([]types.UID, error) {
	entries, err := os.ReadDir(s.dir)
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
		if ok && CheckUID(types.UID(uid)) == nil {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

var uidSyntax = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z-]{0,62}$`)

// CheckUID keeps a UID from becoming another path.
func CheckUID(uid types.UID) error {
	if !uidSyntax.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: want letters, digits and dashes", uid)
	}
	return nil
}

// NoSpace reports whether a write failed because the disk, or a quota on it, is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
