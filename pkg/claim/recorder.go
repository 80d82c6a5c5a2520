// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"sync"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
)

// recorder writes the record of a claim whose groups are worked on at the same time.
// The journal has the parts of the groups that have begun and are not undone.
type recorder struct {
	store *journal.Store

	mu sync.Mutex
	// head is the record without devices.
	head *journal.Record
	// parts are what the journal says, or is about to say, of each group; nil is nothing.
	parts []*journal.Record
}

func newRecorder(store *journal.Store, head *journal.Record, groups int) *recorder {
	empty := *head
	empty.Devices, empty.Sessions = nil, nil
	return &recorder{store: store, head: &empty, parts: make([]*journal.Record, groups)}
}

// set replaces the part of a group in memory.
func (r *recorder) set(group int, part *journal.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts[group] = part.Clone()
}

// save replaces the part of a group and writes the record.
func (r *recorder) save(group int, part *journal.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts[group] = part.Clone()
	return r.write()
}

// drop removes the part of a group. The record goes with the last one.
func (r *recorder) drop(group int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.parts[group] = nil
	if len(r.present()) == 0 {
		return r.store.Delete(r.head.Claim.UID)
	}
	return r.write()
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
}

// state changes how far the claim has come, as the next write will say.
func (r *recorder) state(s journal.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.head.State = s
}

// record returns all parts as one.
func (r *recorder) record() *journal.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.merged()
}

// write needs mu.
func (r *recorder) write() error { return r.store.Save(r.merged()) }

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
