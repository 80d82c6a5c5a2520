// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

// CallLife is more than ten times as long as the kubelet waits for a call. A release is remembered for as long, so that
// older calls must not prepare anything: the machine may have been suspended.
const CallLife = 10 * time.Minute

var (
	// ErrNoRecord means that the claim has no record of this boot.
	ErrNoRecord = errors.New("the claim has no record")
	// ErrOutOfDate refuses a call that is older than the claim's release.
	ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")
)

// diskTime is how long a caller waits for the disk. An operation that takes longer continues in the background; until it returns,
// all others fail at once.
const diskTime = call.SlowAfter

// Store keeps the records of one node. Its methods lock for as long as they take, against other processes too, and nobody
// needs a lock to call them. Where the disk does not answer they fail after diskTime and a moment.
type Store struct {
	folder, boot string
	files        Files
	// disk is for goroutines, in their order, what the folder's lock is for processes. No call into a driver waits for it.
	disk *call.Queue
	// Alone reports whether no other process may have calls at work. Optional. Only then are the files of claims that have nothing any
	// more removed at once. Otherwise they stay, and every observation reads them, for as long as an older call may come.
	Alone func() bool

	releases *releases
}

// Open returns the store in the data folder. It makes no file.
func Open(dataDir, boot string, files Files) (*Store, error) {
	if !uidSyntax.MatchString(boot) {
		return nil, fmt.Errorf("records: boot ID %q: want letters, digits and dashes", boot)
	}
	return &Store{
		folder: filepath.Join(dataDir, "records"), boot: boot, files: files, disk: call.New(0).Of("", "records"),
		releases: &releases{last: map[types.UID]lastRelease{}, changed: make(chan struct{})},
	}, nil
}

// Boot returns the ID of the boot whose records the store writes.
func (s *Store) Boot() string { return s.boot }

// Path returns the first name of a claim's record. It has another where a file of that name cannot be read.
func (s *Store) Path(uid types.UID) string { return filepath.Join(s.folder, string(uid)+"."+s.boot) }

// Changed returns a channel that the next change by this process closes.
func (s *Store) Changed() <-chan struct{} {
	s.releases.mu.Lock()
	defer s.releases.mu.Unlock()
	return s.releases.changed
}

// inTurn does something with the disk, which nobody else does meanwhile.
func inTurn[T any](s *Store, name string, do func() (T, error)) (value T, err error) {
	if out := s.disk.Pending(); out != nil {
		err = out
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), diskTime)
		defer cancel()
		value, err = call.Do(ctx, s.disk, name, do)
	}
	if gpu.IsPending(err) {
		err = fmt.Errorf("%s: the disk does not answer: %v", name, err) //nolint:errorlint // it is not about a GPU
	}
	return value, err
}

// Read returns the record of a claim, if there is none in this boot that of an earlier one, or nil. It fails where there is
// one that cannot be read.
func (s *Store) Read(uid types.UID) (*Record, error) {
	return inTurn(s, "read the record of claim "+string(uid), func() (*Record, error) {
		known, unlock, err := s.open(false, uid)
		defer unlock()
		e := known[uid]
		return cmp.Or(e.record, e.before), cmp.Or(err, e.unreadable())
	})
}

// edit changes what is known of a claim, and writes it. Nobody else sees the change before. It is not made any more once the
// caller has been told that the disk does not answer.
func (s *Store) edit(uid types.UID, change func(*entry) error) error {
	if err := CheckUID(uid); err != nil {
		return err
	}
	var inTime sync.Once
	_, err := inTurn(s, "write the record of claim "+string(uid), func() (struct{}, error) {
		known, unlock, err := s.open(true, uid)
		defer unlock()
		e := known[uid]
		if err == nil {
			err = errors.New("the caller has gone")
			inTime.Do(func() { err = change(e) })
		}
		if err == nil {
			err = s.write(e)
		}
		if err == nil {
			e.unwritten = false
			s.releases.note(uid, e.lastRelease)
		}
		return struct{}{}, err
	})
	inTime.Do(func() {}) // a change that is being made is waited for, and later there is none
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return nil
}

// Put is Update for a claim that may have no record yet, or one that cannot be read: a copy of r is changed then. A record that
// is older than a release of its claim is refused with ErrOutOfDate.
func (s *Store) Put(r *Record, change func(*Record) error) error {
	return s.edit(r.Claim.UID, func(e *entry) error {
		if r.Arrived < e.at {
			return ErrOutOfDate
		}
		if e.record == nil {
			e.record = r.Clone()
		}
		return change(e.record)
	})
}

// Update changes the record of a claim. It needs no space on the disk where only the state, times and marks change. The
// error wraps ErrNoRecord if there is none, and ErrOutOfDate where the record would be older than a release of its claim and
// not be one of a release. The function must not use the store.
func (s *Store) Update(uid types.UID, change func(*Record) error) error {
	return s.edit(uid, func(e *entry) error {
		if e.record == nil {
			return cmp.Or(e.unreadable(), ErrNoRecord)
		}
		if err := change(e.record); err != nil {
			return err
		}
		if e.record.State != Releasing && e.record.Arrived < e.at {
			return ErrOutOfDate
		}
		return nil
	})
}

// Release notes that a call that arrived at that time releases the claim, or wants it released: from then on a record that
// is older than the call reads as Releasing, in all processes. Where the disk refuses it is kept in memory, and the error
// says why: the caller goes on. A record that cannot be read is not touched. Without an error it returns what is known of the
// claim.
func (s *Store) Release(uid types.UID, arrived time.Duration) (known *Snapshot, err error) {
	if err := CheckUID(uid); err != nil {
		return nil, err
	}
	known = &Snapshot{}
	last := lastRelease{at: arrived, unwritten: true}
	err = s.edit(uid, func(e *entry) error {
		e.at, e.unwritten = max(e.at, arrived), true
		e.age()
		if sum := e.sum(); sum != e.covers {
			e.covers, e.cleared = sum, nil
		}
		last = e.lastRelease
		known.add(e)
		known.addOld(filepath.Dir(s.folder), s.boot)
		return nil
	})
	if err != nil {
		s.releases.note(uid, last)
		return nil, err
	}
	return known, nil
}

// Released reports whether the claim was released by a call that arrived after the given time, as far as this process knows. It
// learns of releases by others whenever it reads the records.
func (s *Store) Released(uid types.UID, since time.Duration) bool {
	return s.releases.learn(uid, lastRelease{}).at > since
}

// Clear notes that nothing is left of the claim on a GPU. With the last mark the record goes, and those of earlier boots. Where
// the disk refuses it nobody takes it for cleared: another process may have counted on what the record says.
func (s *Store) Clear(uid types.UID, pciAddress string) error {
	return s.edit(uid, func(e *entry) error {
		if err := e.unreadable(); err != nil {
			return err
		}
		if e.record == nil || e.record.clear(pciAddress) {
			e.record, e.before = nil, nil
		}
		return nil
	})
}

// DropGuards removes the files of a claim that cannot be read, which has a record: all that it has is written down again.
func (s *Store) DropGuards(uid types.UID) error {
	return s.edit(uid, func(e *entry) error {
		if e.record != nil {
			e.drop, e.guards = e.guards, nil
		}
		return nil
	})
}

// ClearGuards notes that nothing is left on a GPU that a claim's unreadable files could be about, as they were when the claim was
// released. A file is removed with the last of its GPUs. One that does not name its GPUs stays: there may be GPUs that are not known now.
func (s *Store) ClearGuards(uid types.UID, pciAddress string) error {
	return s.edit(uid, func(e *entry) error {
		if e.record != nil || !e.isCovered() {
			return nil
		}
		if !slices.Contains(e.cleared, pciAddress) {
			e.cleared = append(slices.Clone(e.cleared), pciAddress)
		}
		e.guards = slices.DeleteFunc(e.guards, func(g file) bool {
			isLeft := func(address string) bool { return !slices.Contains(e.cleared, address) }
			isOver := g.head.gpus != nil && !slices.ContainsFunc(g.head.gpus, isLeft)
			if isOver {
				e.drop = append(e.drop, g)
			}
			return isOver
		})
		if e.covers = e.sum(); len(e.guards) == 0 {
			e.cleared = nil
		}
		return nil
	})
}

// Sweep repeats writes that have failed. It removes the times of releases that no older call can follow any more, and what earlier
// boots and killed processes have left besides records. Other operations get their turn in between.
func (s *Store) Sweep(now time.Duration) error {
	uids, err := inTurn(s, "look for records to sweep", func() (uids []types.UID, err error) {
		known, unlock, err := s.open(true)
		defer unlock()
		if err != nil {
			return nil, err
		}
		for uid, e := range known {
			if e.isOld(now) || e.before == nil && len(e.earlier) > 0 {
				uids = append(uids, uid)
			}
		}
		unfinished, err := filepath.Glob(filepath.Join(s.folder, ".*.tmp")) // nobody else is writing
		for _, path := range unfinished {
			err = errors.Join(err, s.files.Remove(path))
		}
		return uids, err
	})
	for _, uid := range slices.Concat(uids, s.releases.unwritten()) {
		err = errors.Join(err, s.edit(uid, func(e *entry) error {
			e.isOver = e.isOld(now)
			return nil
		}))
	}
	s.releases.forget(now)
	return err
}

// releases are the last ones of claims that this process knows of, its own and those that it has read of.
type releases struct {
	mu   sync.Mutex
	last map[types.UID]lastRelease
	// changed is closed, and made anew, by each change of a record.
	changed chan struct{}
}

// forget forgets releases that no call can be older than, if the disk has them.
func (r *releases) forget(now time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.last, func(_ types.UID, one lastRelease) bool {
		return !one.unwritten && len(one.cleared) == 0 && now-one.at >= CallLife
	})
}

// learn returns what is known of the last release of a claim, of which the disk says this.
func (r *releases) learn(uid types.UID, said lastRelease) lastRelease {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.last[uid]
	if said.at > known.at {
		known = lastRelease{at: said.at} // another process knows what it has covered
		r.last[uid] = known
	}
	known.covers = cmp.Or(known.covers, said.covers)
	return known
}

// note remembers what is known of a claim's release, unless a later one is, and wakes all who wait for a change.
func (r *releases) note(uid types.UID, one lastRelease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one.at > 0 && one.at >= r.last[uid].at {
		r.last[uid] = one
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// unwritten lists the claims of which only this process knows that they were released.
func (r *releases) unwritten() (uids []types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, one := range r.last {
		if one.unwritten {
			uids = append(uids, uid)
		}
	}
	return uids
}
