// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"sync"
	"time"
)

// inflight counts calls. Its zero value is ready.
type inflight struct {
	mu    sync.Mutex
	count int
	ended time.Time
	// idle is closed when count falls to 0.
	idle chan struct{}
}

// begin counts a call until end is called.
func (f *inflight) begin() (end func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count == 0 {
		f.idle = make(chan struct{})
	}
	f.count++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.count--
		f.ended = time.Now()
		if f.count == 0 {
			close(f.idle)
		}
	}
}

// waitIdle waits until no call is running and none has ended for the time quiet.
// It returns false if that does not happen within timeout.
func (f *inflight) waitIdle(timeout, quiet time.Duration) bool {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for {
		idle, left := f.state(quiet)
		if idle != nil {
			select {
			case <-idle:
				continue
			case <-deadline.C:
				return false
			}
		}
		if left <= 0 {
			return true
		}
		select {
		case <-time.After(left):
		case <-deadline.C:
			return false
		}
	}
}

// state returns a channel to wait on while calls are running, and otherwise how
// much of the quiet time is left.
func (f *inflight) state(quiet time.Duration) (idle <-chan struct{}, left time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count > 0 {
		return f.idle, 0
	}
	return nil, quiet - time.Since(f.ended)
}
