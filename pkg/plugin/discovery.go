// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"sync"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/panics"
)

// discovery is the result of reading everything about all GPUs.
type discovery struct {
	node *gpu.Node
	err  error
}

// discoverer reads everything about all GPUs, which takes as long as the hardware does.
type discoverer struct {
	hardware Hardware
	startup  *startup
	// found has room for the one that may be in progress, which is over when it was received.
	found      chan discovery
	running    sync.WaitGroup
	inProgress bool
	panics     panics.Repeated
}

func newDiscoverer(hardware Hardware, startup *startup) *discoverer {
	return &discoverer{hardware: hardware, startup: startup, found: make(chan discovery, 1)}
}

// begin discovers in a goroutine of its own, since a GPU that does not answer delays it, unless one does so already.
func (d *discoverer) begin(ctx context.Context) {
	if d.inProgress {
		return
	}
	d.inProgress = true
	d.running.Go(func() { d.found <- d.discover(ctx) })
}

// discover ends soon after ctx does.
func (d *discoverer) discover(ctx context.Context) (found discovery) {
	defer d.panics.Recover(ctx, &found.err)
	if err := d.hardware.Open(ctx); err != nil {
		return discovery{err: err}
	}
	d.startup.opened()
	node, err := d.hardware.Discover(ctx)
	if err != nil {
		return discovery{err: fmt.Errorf("discover the GPUs: %w", err)}
	}
	return discovery{node: node}
}
