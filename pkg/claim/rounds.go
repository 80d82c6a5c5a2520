// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"sync"
)

// rounds are what is being done for GPUs, by PCI address.
type rounds struct {
	mu     sync.Mutex
	atWork map[string]*round
}

// round is what is done for one GPU, until its channel is closed.
type round struct {
	gpu  string
	done chan struct{}
	err  error
}

// begin returns the round that is at work for a GPU, or lets one begin.
func (all *rounds) begin(address string, do func() error) *round {
	all.mu.Lock()
	defer all.mu.Unlock()
	if r := all.atWork[address]; r != nil {
		return r
	}
	r := &round{gpu: address, done: make(chan struct{})}
	if all.atWork == nil {
		all.atWork = map[string]*round{}
	}
	all.atWork[address] = r
	go func() {
		defer close(r.done)
		r.err = do()
		all.mu.Lock()
		defer all.mu.Unlock()
		delete(all.atWork, address)
	}()
	return r
}

// wait returns what has come of a round, or that it goes on without the caller.
func (r *round) wait(ctx context.Context) error {
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("GPU %s: this takes long and goes on", r.gpu)
	}
}
