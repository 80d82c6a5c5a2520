// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package steptime adds up where the time of an operation on a claim goes. The operation
// puts [Times] into its context, and whatever works for it adds to them. Where the context
// has none, nothing is measured.
package steptime

import (
	"context"
	"sync"
	"time"
)

// Step is something that takes time. No step contains another.
type Step string

// Steps of a call, whose times are told apart.
const (
	// Wait is waiting: for the driver to start, for locks, for a place that another claim has,
	// and for the next attempt.
	Wait Step = "wait"
	// NVML are calls of the NVIDIA library.
	NVML Step = "nvml"
	// CDI is writing and removing the CDI spec.
	CDI Step = "cdi"
	// Journal is writing the journal.
	Journal Step = "journal"
	// MPS are calls of the MPS supervisor.
	MPS Step = "mps"
)

// All returns every Step, in the order of the metrics.
func All() []Step { return []Step{Wait, NVML, CDI, Journal, MPS} }

// Times are those of one operation. Work on several GPUs at the same time adds up, so that
// they may be more than the operation took.
type Times struct {
	mu   sync.Mutex
	took map[Step]time.Duration
}

type key struct{}

// With returns a context that carries times, which are zero at first.
func With(ctx context.Context) (context.Context, *Times) {
	times := &Times{took: map[Step]time.Duration{}}
	return context.WithValue(ctx, key{}, times), times
}

// Took returns how long a step took, and whether there was any.
func (t *Times) Took(step Step) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	took, ok := t.took[step]
	return took, ok
}

// Of returns the times of the operation that the context belongs to, or nil.
func Of(ctx context.Context) *Times {
	times, _ := ctx.Value(key{}).(*Times)
	return times
}

// Add adds time to a step. Times that are nil stay so.
func (t *Times) Add(step Step, took time.Duration) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.took[step] += took
}

// Begin begins a step, which the returned function ends.
func (t *Times) Begin(step Step) (end func()) {
	began := time.Now()
	return func() { t.Add(step, time.Since(began)) }
}
