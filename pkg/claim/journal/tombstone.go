// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// tombstoneLife is more than ten times as long as any call lives.
const tombstoneLife = 10 * time.Minute

// ErrOutOfDate refuses a call that is older than the claim's release.
var ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")

// tombstones say when the release of claims began, so that a Prepare that was on its
// way since before comes too late, and that whoever finds a record knows that it is one
// of a claim that is being released. They need not outlive the machine, because no call
// does, nor what a record is about.
type tombstones struct {
	dir, boot string
	files     Files

	mu sync.Mutex
	// unwritten are those for which the disk had no space.
	unwritten map[types.UID]time.Duration
	// young are those that a sweep has read, with what they say at least: claims that are prepared
	// and released again and again leave hundreds of them.
	young map[types.UID]time.Duration
}

type tombstone struct {
	BootID string `json:"bootID"`
	// Released is the arrival of the call that released the claim, in nanoseconds
	// since the machine started.
	Released time.Duration `json:"released"`
}

func (t *tombstones) path(uid types.UID) string { return filepath.Join(t.dir, string(uid)) }

// written returns the one that all processes see, or nil. One that makes no sense was cut
// off with its writer, whose call will be repeated.
func (t *tombstones) written(uid types.UID) (*tombstone, error) {
	var stone tombstone
	data, err := os.ReadFile(t.path(uid))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("tombstone of claim %s: %w", uid, err)
	case json.Unmarshal(data, &stone) != nil:
		return &tombstone{}, nil //nolint:nilerr // see above
	}
	return &stone, nil
}

// read is written, with those for which the disk had no space.
func (t *tombstones) read(uid types.UID) (*tombstone, error) {
	stone, err := t.written(uid)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	released, unwritten := t.unwritten[uid]
	if unwritten && (stone == nil || stone.BootID != t.boot || released > stone.Released) {
		return &tombstone{BootID: t.boot, Released: released}, nil
	}
	return stone, nil
}

// Bury notes that a call that arrived at that time releases the claim, or wants it
// released, and reports whether other processes know. On a full disk the note is kept
// in memory.
//
// From then on a record that is older than that call is one of a claim that is being
// released, so that the record itself need not be written once more before it is removed.
func (s *Store) Bury(uid types.UID, arrived time.Duration) (written bool, err error) {
	t := &s.tombstones
	earlier, err := t.read(uid)
	if err != nil {
		return false, err
	}
	if earlier != nil && earlier.BootID == t.boot && earlier.Released >= arrived {
		return !t.inMemory(uid), nil
	}
	data, err := json.Marshal(tombstone{BootID: t.boot, Released: arrived})
	if err == nil {
		write := t.files.Write
		if earlier != nil {
			write = t.files.Replace // nobody may find less than the earlier one
		}
		err = write(t.path(uid), data, recordMode)
	}
	if NoSpace(err) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.unwritten == nil {
			t.unwritten = map[types.UID]time.Duration{}
		}
		t.unwritten[uid] = arrived
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("tombstone of claim %s: %w", uid, err)
	}
	return true, nil
}

func (t *tombstones) inMemory(uid types.UID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, unwritten := t.unwritten[uid]
	return unwritten
}

// Released reports whether the claim was released by a call that arrived after the
// given time.
func (s *Store) Released(uid types.UID, since time.Duration) (bool, error) {
	stone, err := s.tombstones.read(uid)
	if err != nil || stone == nil {
		return false, err
	}
	return stone.BootID == s.boot && since < stone.Released, nil
}

// isReleasing reports whether a call wanted the claim of a record released and has not ended
// that. Older versions did not write down what it takes to know.
func (s *Store) isReleasing(r *Record) (bool, error) {
	if r.Arrived == 0 || r.BootID != s.boot {
		return false, nil
	}
	stone, err := s.tombstones.written(r.Claim.UID)
	if err != nil || stone == nil {
		return false, err
	}
	return stone.BootID == s.boot && r.Arrived < stone.Released, nil
}

// SweepTombstones removes those that no call can be older than, of claims that have no
// record. It passes over claims that a call is at work on.
func (s *Store) SweepTombstones(now time.Duration, tryClaim func(types.UID) (func(), error)) error {
	entries, err := os.ReadDir(s.tombstones.dir)
	if err != nil {
		return fmt.Errorf("tombstones: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		uid := types.UID(entry.Name())
		if CheckUID(uid) == nil {
			errs = append(errs, s.sweepTombstone(uid, now, tryClaim))
		}
	}
	s.tombstones.forget(now)
	return errors.Join(errs...)
}

func (s *Store) sweepTombstone(uid types.UID, now time.Duration, tryClaim func(types.UID) (func(), error)) error {
	// Without the lock first: most are young.
	if old, err := s.tombstones.isOld(uid, now); err != nil || !old {
		return err
	}
	release, err := tryClaim(uid)
	if err != nil || release == nil {
		return err
	}
	defer release()
	if old, err := s.tombstones.isOld(uid, now); err != nil || !old {
		return err
	}
	if r, err := s.Read(uid); err != nil || r != nil && r.State == Unpreparing {
		return nil // it may be all that says that the claim is being released
	}
	if err := s.files.Remove(s.tombstones.path(uid)); err != nil {
		return fmt.Errorf("tombstone of claim %s: %w", uid, err)
	}
	return nil
}

// isOld reports whether there is a tombstone that no call can be older than.
func (t *tombstones) isOld(uid types.UID, now time.Duration) (bool, error) {
	if t.isYoung(uid, now) {
		return false, nil
	}
	stone, err := t.read(uid)
	if err != nil || stone == nil {
		return false, err
	}
	if stone.BootID != t.boot || now-stone.Released >= tombstoneLife {
		return true, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.young == nil {
		t.young = map[types.UID]time.Duration{}
	}
	t.young[uid] = stone.Released
	return false, nil
}

func (t *tombstones) isYoung(uid types.UID, now time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	released, known := t.young[uid]
	return known && now-released < tombstoneLife
}

func (t *tombstones) forget(now time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, known := range []map[types.UID]time.Duration{t.unwritten, t.young} {
		maps.DeleteFunc(known, func(_ types.UID, released time.Duration) bool { return now-released >= tombstoneLife })
	}
}
