// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
)

// repeatAfter is how long an event about something that lasts is left alone, less up to repeatJitter: not all nodes repeat
// theirs at the same time. API servers keep events for an hour by default.
const (
	repeatAfter  = 50 * time.Minute
	repeatJitter = 10 * time.Minute
	// lookInterval is the time between two looks for what has to be repeated.
	lookInterval = time.Minute
)

// Teller tells people. Its method does not block.
type Teller interface {
	Tell(ctx context.Context, events ...Event)
}

// None tells nobody.
type None struct{}

// Tell does nothing.
func (None) Tell(context.Context, ...Event) {}

// Statement is something that holds now. Warnings are repeated as long as they hold, others are told once.
type Statement struct {
	Event
	// Key tells it apart from others of its source: the text may change without being news. It is comparable; by default the
	// text is the key.
	Key any
	// Calm is how long it must not have held to be over: what comes and goes is told once.
	Calm time.Duration
}

// Board has what holds now, as its sources say it, and tells what begins, what lasts and what is over. What was told is known
// to this process only: the next one tells again what holds.
type Board struct {
	teller Teller

	mu      sync.Mutex
	sources map[string][]told
}

// told is a statement that was told, and when to repeat it. Of one that does not hold any more, but is not over yet, it is
// when it will be, and what is told then, if anything.
type told struct {
	Statement
	repeat time.Time
	over   time.Time
	end    []Event
}

// NewBoard makes a Board.
func NewBoard(teller Teller) *Board { return &Board{teller: teller, sources: map[string][]told{}} }

// Say takes all that a source knows to hold now. Of what does not hold any more, over returns the event that tells it, if there
// is to be one; it is optional.
func (b *Board) Say(ctx context.Context, source string, now []Statement, over func(was Statement) (Event, bool)) {
	if over == nil {
		over = func(Statement) (Event, bool) { return Event{}, false }
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	before, next := b.sources[source], make([]told, 0, len(now))
	var begun, ended []Event
	for _, s := range now {
		if s.Key == nil {
			s.Key = s.Text
		}
		if indexOf(next, s.Key) >= 0 {
			continue
		}
		one := told{Statement: s, repeat: repeatAt(time.Now())}
		if at := indexOf(before, s.Key); at >= 0 {
			one.repeat = before[at].repeat
		} else {
			begun = append(begun, s.Event)
		}
		next = append(next, one)
	}
	for _, was := range before {
		if indexOf(next, was.Key) >= 0 {
			continue
		}
		if was.over.IsZero() {
			was.over = time.Now().Add(was.Calm)
			if e, is := over(was.Statement); is {
				was.end = []Event{e}
			}
		}
		if time.Now().Before(was.over) {
			next = append(next, was)
		} else {
			ended = append(ended, was.end...)
		}
	}
	b.sources[source] = next
	b.tell(ctx, ended)
	b.tell(ctx, begun)
}

func indexOf(all []told, key any) int {
	return slices.IndexFunc(all, func(t told) bool { return t.Key == key })
}

func (b *Board) tell(ctx context.Context, all []Event) {
	all = join(all)
	for i := range all {
		e := &all[i]
		if e.Claim == (claim.Ref{}) {
			klog.FromContext(ctx).Info("Event", "reason", e.Reason, "message", e.Message())
		} else {
			klog.FromContext(ctx).V(2).Info("Event", "reason", e.Reason, "claim", e.Claim, "message", e.Message())
		}
	}
	b.teller.Tell(ctx, all...)
}

// Run repeats what lasts, and tells what is over after a time of calm, until ctx ends.
func (b *Board) Run(ctx context.Context) {
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			b.repeat(ctx, time.Now())
		}
	}
}

func (b *Board) repeat(ctx context.Context, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, source := range b.sources {
		var due, ended []Event
		b.sources[name] = slices.DeleteFunc(source, func(t told) bool {
			over := !t.over.IsZero() && !now.Before(t.over)
			if over {
				ended = append(ended, t.end...)
			}
			return over
		})
		for i := range b.sources[name] {
			one := &b.sources[name][i]
			if one.over.IsZero() && one.eventType() == corev1.EventTypeWarning && !now.Before(one.repeat) {
				due = append(due, one.Event)
				one.repeat = repeatAt(now)
			}
		}
		b.tell(ctx, ended)
		b.tell(ctx, due)
	}
}

func repeatAt(now time.Time) time.Time {
	return now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret
}
