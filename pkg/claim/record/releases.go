// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// releases are the last ones of claims that this process knows of, its own and those that it has read of.
type releases struct {
	mu   sync.Mutex
	last map[types.UID]lastRelease
	// changed is closed, and made anew, by each change of a record.
	changed chan struct{}
}

// lastRelease is when a claim was last released. One that the disk would not take only this process knows of, until a write works.
type lastRelease struct {
	at        time.Duration
	unwritten bool
}

// note notes when a claim was released, and whether the disk has that, and wakes all who wait for a change.
func (r *releases) note(uid types.UID, at time.Duration, written bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.last[uid]; at > 0 && (at >= known.at || !written) {
		r.last[uid] = lastRelease{max(at, known.at), !written}
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// learn notes a release that the disk has, and returns the last one that is known.
func (r *releases) learn(uid types.UID, at time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at > r.last[uid].at {
		r.last[uid] = lastRelease{at: at}
	}
	return r.last[uid].at
}

// of returns the last release of a claim, or zero.
func (r *releases) of(uid types.UID) lastRelease {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last[uid]
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

// forget forgets releases that no call can be older than, if the disk has them.
func (r *releases) forget(now time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.last, func(_ types.UID, one lastRelease) bool { return !one.unwritten && now-one.at >= CallLife })
}
