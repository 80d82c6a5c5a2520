// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package feed gives the current state of a page to those who ask, and what has changed since
// to those who stay.
package feed

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"sync"
)

// State is a page by the keys of its parts.
type State = map[string]json.RawMessage

// Event is what a subscriber receives.
type Event struct {
	// Full says that Set is all there is, and not a change.
	Full bool `json:"-"`
	// Set are new and changed parts, Gone the keys of removed ones.
	Set  State    `json:"set,omitempty"`
	Gone []string `json:"gone,omitempty"`
}

// behind is how many events a subscriber may be behind.
const behind = 16

// Feed has a state and subscribers. The zero value is empty and ready to use.
type Feed struct {
	mu          sync.Mutex
	state       State
	subscribers map[chan Event]struct{}
}

// Publish replaces the state, which must not be changed any more, and reports whether it differs
// from the one before. Subscribers receive the difference. One that is too far behind is
// dropped: its channel is closed, and it has to subscribe again.
func (f *Feed) Publish(state State) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	change := difference(f.state, state)
	if f.state != nil && len(change.Set) == 0 && len(change.Gone) == 0 {
		return false
	}
	f.state = state
	for s := range f.subscribers {
		select {
		case s <- change:
		default:
			delete(f.subscribers, s)
			close(s)
		}
	}
	return true
}

// State returns the current state, nil if there is none yet. It must not be changed.
func (f *Feed) State() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

// Subscribe returns a channel whose first event is the full state, if there is one, and a
// function that ends the subscription.
func (f *Feed) Subscribe() (events <-chan Event, end func()) {
	s := make(chan Event, behind)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.subscribers == nil {
		f.subscribers = map[chan Event]struct{}{}
	}
	f.subscribers[s] = struct{}{}
	if f.state != nil {
		s <- Event{Full: true, Set: f.state}
	}
	return s, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.subscribers, s)
	}
}

func difference(from, to State) Event {
	change := Event{Set: State{}}
	for key, value := range to {
		if !bytes.Equal(from[key], value) {
			change.Set[key] = value
		}
	}
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if _, has := to[key]; !has {
			change.Gone = append(change.Gone, key)
		}
	}
	return change
}
