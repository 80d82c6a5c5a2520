// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// ErrStop ends Run when an error of Hardware.Open wraps it. Every other error of
// the hardware is retried for ever.
var ErrStop = errors.New("the plugin must be restarted")

// Hardware finds the GPUs of this machine. Its methods return in bounded time,
// with an error that wraps gpu.ErrHung where the hardware does not.
type Hardware interface {
	// Open returns an error that wraps gpu.ErrDriverNotLoaded while there is no
	// driver. It is called again after it succeeded.
	Open(ctx context.Context) error
	Discover(ctx context.Context) (*gpu.Node, error)
	// Removed reports whether a GPU was taken out, or given to another driver.
	Removed(pciAddress string) bool
}

// rediscoverAfter is the number of intervals after which the GPUs are discovered again although nothing seems to be wrong: a MIG mode
// that an administrator changed, or a GPU that was added, shows nowhere else.
const rediscoverAfter = 6

// discoverer reads everything about all GPUs, which takes as long as the hardware does.
type discoverer struct {
	hardware Hardware
	interval time.Duration
	// opened is told when the GPUs can be used.
	opened func()
	// found has room for the one that may be in progress, which is over when it was received.
	found      chan discovery
	running    sync.WaitGroup
	inProgress bool
	// last is when the last began, and inTrouble says that a GPU failed then.
	last      time.Time
	inTrouble bool

	problem logchange.Problem
	panics  panics.Repeated
}

// discovery is the result.
type discovery struct {
	node *gpu.Node
	err  error
}

// isDue is asked at each poll, of which there may be some between those of the interval. What was discovered may not hold while a GPU
// fails, nor when that is over.
func (d *discoverer) isDue(isTrouble bool) bool {
	after := rediscoverAfter * d.interval
	if isTrouble || d.inTrouble {
		after = d.interval
	}
	if d.inProgress || time.Since(d.last) < after-d.interval/2 {
		return false
	}
	d.last, d.inTrouble = time.Now(), isTrouble
	return true
}

// begin discovers in a goroutine of its own, since a GPU that does not answer delays it.
func (d *discoverer) begin(ctx context.Context) {
	d.inProgress = true
	d.running.Go(func() { d.found <- d.discover(ctx) })
}

// discover ends soon after ctx does.
func (d *discoverer) discover(ctx context.Context) (found discovery) {
	defer d.panics.Recover(ctx, &found.err)
	if err := d.hardware.Open(ctx); err != nil {
		return discovery{err: err}
	}
	d.opened()
	node, err := d.hardware.Discover(ctx)
	if err != nil {
		return discovery{err: fmt.Errorf("discover the GPUs: %w", err)}
	}
	return discovery{node: node}
}
