// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"time"
)

const (
	// silence is for how long nobody asks about slices or events when a phase is over.
	silence = 5 * time.Second
	// phaseLimit is far more than any phase takes.
	phaseLimit = 30 * time.Minute
	// look is the time between two looks whether it is over.
	look = 100 * time.Millisecond
)

// Phase is one thing that happens to all nodes.
type Phase struct {
	Name string
	// Begin begins it.
	Begin func(ctx context.Context) error
	// Kind is the request that counts, and AtLeast how many of them there must be before it can
	// be over, answered or not: what has no answer may have been done.
	Kind    string
	AtLeast int
	// Check looks whether everything is as it should be afterwards. Optional.
	Check func(ctx context.Context) error
}

// Result is what a phase cost.
type Result struct {
	Name string
	// Took is the time to the last request about slices or events.
	Took   time.Duration
	Counts Counts
	// CPU of each component.
	CPU map[string]time.Duration
}

// run goes through a phase.
func (p Phase) run(ctx context.Context, traffic *Traffic, control processes) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, phaseLimit)
	defer cancel()
	cpuBefore, err := control.cpu()
	if err != nil {
		return Result{}, err
	}
	traffic.Restart()
	before, began := traffic.Counts(), time.Now()
	if err := p.Begin(ctx); err != nil {
		return Result{}, fmt.Errorf("%s: %w", p.Name, err)
	}
	counts, err := p.await(ctx, traffic, before)
	if err != nil {
		return Result{}, err
	}
	cpu, err := control.cpu()
	if err != nil {
		return Result{}, err
	}
	for name := range cpu {
		cpu[name] -= cpuBefore[name]
	}
	if p.Check != nil {
		if err := p.Check(ctx); err != nil {
			return Result{}, fmt.Errorf("%s: after %v: %w", p.Name, counts.Answered, err)
		}
	}
	return Result{Name: p.Name, Took: counts.Last.Sub(began), Counts: counts, CPU: cpu}, nil
}

// await returns what was counted once the phase is over.
func (p Phase) await(ctx context.Context, traffic *Traffic, before Counts) (Counts, error) {
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for {
		counts := traffic.Counts().Since(before)
		if counts.asked(p.Kind) >= p.AtLeast && time.Since(counts.Last) >= silence {
			return counts, nil
		}
		select {
		case <-ctx.Done():
			return counts, fmt.Errorf("%s: %w: %d of %d requests to %s; answered %v, refused %v",
				p.Name, ctx.Err(), counts.asked(p.Kind), p.AtLeast, p.Kind, counts.Answered, counts.Refused)
		case <-ticker.C:
		}
	}
}
