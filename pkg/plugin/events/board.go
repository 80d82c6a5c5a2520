// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"maps"
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
	// repeatSoon is that of what has begun again within that time: by then the limits let it through.
	repeatSoon = 6 * time.Minute
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
	sources map[string]*source
}

// source is what one has said: what holds, and when what does not was over.
type source struct {
	all  []told
	past map[any]time.Time
}

// told is a statement that was told, and when to repeat it. Of one that does not hold any more, but is not over yet, it is
// when it will be, and what is told then, if anything.
type told struct {
	Statement
	repeat  time.Time
	missing bool
	over    time.Time
	end     []Event
}

// NewBoard makes a Board.
func NewBoard(teller Teller) *Board { return &Board{teller: teller, sources: map[string]*source{}} }

// Say takes all that a source knows to hold now. Of what does not hold any more, over returns the event that tells it, if there
// is to be one; it is optional.
func (b *Board) Say(ctx context.Context, name string, now []Statement, over func(was Statement) (Event, bool)) {
	if over == nil {
		over = func(Statement) (Event, bool) { return Event{}, false }
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	from := b.sources[name]
	if from == nil {
		from = &source{past: map[any]time.Time{}}
		b.sources[name] = from
	}
	begun := from.begin(now)
	for i := range from.all {
		if one := &from.all[i]; one.missing && one.over.IsZero() {
			one.over = time.Now().Add(one.Calm)
			if e, is := over(one.Statement); is {
				one.end = []Event{e}
			}
		}
	}
	b.tell(ctx, from.end(time.Now()))
	b.tell(ctx, begun)
}

// begin takes what holds now, and returns the events of what is new.
func (s *source) begin(now []Statement) (begun []Event) {
	at := make(map[any]int, len(s.all))
	for i := range s.all {
		at[s.all[i].Key] = i
		s.all[i].missing = true
	}
	usual := repeatAt(time.Now()) // what begins together is repeated together
	for _, one := range now {
		if one.Key == nil {
			one.Key = one.Text
		}
		if i, known := at[one.Key]; known {
			s.all[i] = told{Statement: one, repeat: s.all[i].repeat}
			continue
		}
		repeat := usual
		if over, again := s.past[one.Key]; again && time.Since(over) < repeatAfter {
			repeat = time.Now().Add(repeatSoon)
		}
		at[one.Key] = len(s.all)
		s.all = append(s.all, told{Statement: one, repeat: repeat})
		begun = append(begun, one.Event)
	}
	return begun
}

// end removes what is over, and returns its events.
func (s *source) end(now time.Time) (ended []Event) {
	maps.DeleteFunc(s.past, func(_ any, over time.Time) bool { return now.Sub(over) >= repeatAfter })
	s.all = slices.DeleteFunc(s.all, func(t told) bool {
		if t.over.IsZero() || now.Before(t.over) {
			return false
		}
		s.past[t.Key] = now
		ended = append(ended, t.end...)
		return true
	})
	return ended
}

// due are the events of what lasts and has to be told again.
func (s *source) due(now time.Time) (due []Event) {
	again := repeatAt(now)
	for i := range s.all {
		if one := &s.all[i]; one.over.IsZero() && one.eventType() == corev1.EventTypeWarning && !now.Before(one.repeat) {
			due = append(due, one.Event)
			one.repeat = again
		}
	}
	return due
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
	for _, source := range b.sources {
		b.tell(ctx, source.end(now))
		b.tell(ctx, source.due(now))
	}
}

func repeatAt(now time.Time) time.Time {
	return now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret
}
