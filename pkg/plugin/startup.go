// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/device"
)

// startPatience is for how long a GPU that does not answer holds up claims on GPUs
// that an earlier process has discovered.
const startPatience = 3 * time.Second

// startup holds calls back while the plugin is starting, so that the first pods
// after a restart do not fail and wait a minute for the next attempt.
type startup struct {
	once sync.Once
	done chan struct{}

	mu sync.Mutex
	// known are the devices that an earlier process has discovered, or nil.
	known *device.Inventory
	// patience ends when claims for these need not wait any more.
	openedOnce sync.Once
	patience   chan struct{}
}

func newStartup() *startup {
	return &startup{done: make(chan struct{}), patience: make(chan struct{})}
}

// recalled says which devices an earlier process has discovered.
func (s *startup) recalled(known *device.Inventory) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = known
}

// opened says that the GPUs can be used. If they are not all discovered soon, because
// one of them does not answer, calls for devices that were recalled are let through.
func (s *startup) opened() {
	s.openedOnce.Do(func() { time.AfterFunc(startPatience, func() { close(s.patience) }) })
}

// finish lets all calls through: there is an inventory and leftovers are removed,
// or it is known that there is no driver yet.
func (s *startup) finish() { s.once.Do(func() { close(s.done) }) }

// wait returns when a call for these devices may go on, ctx ends, or timeout has
// passed.
func (s *startup) wait(ctx context.Context, devices []string, timeout time.Duration) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	patience := s.patience
	for {
		select {
		case <-s.done:
		case <-patience:
			if !s.knows(devices) {
				patience = nil
				continue
			}
		case <-ctx.Done():
		case <-timer.C:
		}
		return
	}
}

func (s *startup) knows(devices []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil {
		return false
	}
	for _, name := range devices {
		if _, known := s.known.Lookup(name); !known {
			return false
		}
	}
	return true
}
