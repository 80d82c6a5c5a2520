// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/partage-dev/partage/pkg/device"
)

// startPatience is for how long a GPU that does not answer holds up claims on GPUs
// that an earlier process has discovered.
const startPatience = 3 * time.Second

// startup holds calls back while the plugin is starting, so that the first pods
// after a restart do not fail and wait a minute for the next attempt.
type startup struct {
	// finish lets all calls through: there is an inventory and leftovers are removed,
	// or it is known that there is no driver yet.
	finish func()
	// opened says that the GPUs can be used. If they are not all discovered soon, because
	// one of them does not answer, calls for devices that were recalled are let through.
	opened func()
	// recalled are the devices that an earlier process has discovered, or nil.
	recalled atomic.Pointer[device.Inventory]

	done, patience chan struct{}
}

func newStartup() *startup {
	s := &startup{done: make(chan struct{}), patience: make(chan struct{})}
	s.finish = sync.OnceFunc(func() { close(s.done) })
	s.opened = sync.OnceFunc(func() { time.AfterFunc(startPatience, func() { close(s.patience) }) })
	return s
}

// wait returns when a call for these devices may go on, ctx ends, or timeout has
// passed.
func (s *startup) wait(ctx context.Context, devices []string, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-s.done:
	case <-ctx.Done():
	case <-s.patience:
		if !s.knows(devices) {
			select {
			case <-s.done:
			case <-ctx.Done():
			}
		}
	}
}

func (s *startup) knows(devices []string) bool {
	recalled := s.recalled.Load()
	return recalled != nil && !slices.ContainsFunc(devices, func(name string) bool {
		_, known := recalled.Lookup(name)
		return !known
	})
}
