// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/steptime"
)

// recorder writes the record of a claim whose groups are worked on at the same time.
// The journal has the parts of the groups that have begun and are not undone.
type recorder struct {
	store *journal.Store
	// times are those of the operation, or nil.
	times *steptime.Times

	mu sync.Mutex
	// head is the record without devices.
	head *journal.Record
	// parts are what the journal says, or is about to say, of each group; nil is nothing.
	parts []*journal.Record
	// version counts the changes.
	version int

	// writing is held while the record is written, which takes its time.
	writing sync.Mutex
	// written is the version that the journal has; deleted means that it has none.
	written int
	deleted bool
	// unwritten means that the journal has parts that were released.
	unwritten atomic.Bool
}

func newRecorder(ctx context.Context, store *journal.Store, head *journal.Record, groups int) *recorder {
	empty := *head
	empty.Devices, empty.Sessions = nil, nil
	return &recorder{store: store, times: steptime.Of(ctx), head: &empty, parts: make([]*journal.Record, groups)}
}

// set replaces the part of a group in memory; nil removes it.
func (r *recorder) set(group int, part *journal.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts[group] = nil
	if part != nil {
		r.parts[group] = part.Clone()
	}
	r.version++
}

// save replaces the part of a group and writes the record.
func (r *recorder) save(group int, part *journal.Record) error {
	r.set(group, part)
	return r.write()
}

// drop removes the part of a group. The record goes with the last one. As long as that is
// not written down others count the part, so that it stays and has to be undone again.
func (r *recorder) drop(group int) error {
	was := r.part(group)
	r.set(group, nil)
	err := r.write()
	if err != nil && was != nil {
		r.set(group, was)
	}
	return err
}

// write brings the journal to the state at this moment, or later: groups that wait for
// each other here are written at once.
func (r *recorder) write() error {
	r.mu.Lock()
	want := r.version
	r.mu.Unlock()
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.written >= want {
		return nil
	}
	r.mu.Lock()
	version, present, all := r.version, len(r.present()), r.merged()
	r.mu.Unlock()
	defer r.times.Begin(steptime.Journal)()
	var err error
	if present == 0 {
		err = r.store.Delete(all.Claim.UID)
	} else {
		err = r.store.Save(all)
	}
	if err == nil {
		r.written, r.deleted = version, present == 0
	}
	return err
}

// finish removes what is left of the record, if there is anything.
func (r *recorder) finish() error {
	r.writing.Lock()
	defer r.writing.Unlock()
	if r.deleted {
		return nil
	}
	defer r.times.Begin(steptime.Journal)()
	return r.store.Delete(r.head.Claim.UID)
}

// part returns what the journal says of a group, or nil.
func (r *recorder) part(group int) *journal.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.parts[group]; p != nil && len(p.Devices) > 0 {
		return p.Clone()
	}
	return nil
}

// setAll divides a record into the parts of its groups, in memory.
func (r *recorder) setAll(groups []step.Group, whole *journal.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, g := range groups {
		r.parts[i] = step.PartOf(whole, g)
	}
	r.version++
}

// notPrepared takes back that the claim is prepared. A claim that is being released stays
// so.
func (r *recorder) notPrepared() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.head.State == journal.Prepared {
		r.head.State = journal.Preparing
		r.version++
	}
}

// state changes how far the claim has come, as the next write will say.
func (r *recorder) state(s journal.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.head.State = s
	r.version++
}

// record returns all parts as one.
func (r *recorder) record() *journal.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.merged()
}

// merged needs mu.
func (r *recorder) merged() *journal.Record {
	all := step.Merge(append([]*journal.Record{r.head}, r.present()...)...)
	all.State = r.head.State
	return all
}

// present needs mu.
func (r *recorder) present() []*journal.Record {
	var parts []*journal.Record
	for _, p := range r.parts {
		if p != nil && len(p.Devices) > 0 {
			parts = append(parts, p)
		}
	}
	return parts
}
