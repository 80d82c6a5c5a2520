// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"sync"
	"time"
)

// startup holds calls back while the plugin is starting, so that the first pods
// after a restart do not fail and wait a minute for the next attempt.
type startup struct {
	once sync.Once
	done chan struct{}
}

func newStartup() *startup { return &startup{done: make(chan struct{})} }

// finish lets all calls through: there is an inventory and leftovers are removed,
// or it is known that there is no driver yet.
func (s *startup) finish() { s.once.Do(func() { close(s.done) }) }

// wait returns when the start is finished, ctx ends, or timeout has passed.
func (s *startup) wait(ctx context.Context, timeout time.Duration) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}
