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

	"github.com/partage-dev/partage/pkg/driver/claim"
)

const (
	// repeatAfter is how long an event about something that lasts is left alone, less up to repeatJitter: not all nodes repeat
	// theirs at the same time. API servers keep events for an hour by default.
	repeatAfter, repeatJitter = 50 * time.Minute, 10 * time.Minute
	// calm is how long something that has come back often must be away to be over.
	calm, often = 10 * time.Minute, 3
)

// Tell tells people, and does not block.
type Tell func(ctx context.Context, events ...Event)

// Statement is something that holds now. Warnings are repeated as long as they hold, others are told once.
type Statement struct {
	Event
	// Key tells it apart from others of its source: the text may change without being news. It is comparable; by default the
	// text is the key.
	Key any
}

// Over returns the event that tells that something does not hold any more, if there is to be one.
type Over func(was Statement) (e Event, is bool)

// Board has what holds now, as its sources say it, and tells what begins, what lasts and what is over. What was told is known
// to this process only: the next one tells again what holds.
type Board struct {
	tell Tell

	mu      sync.Mutex
	sources map[string]*source
}

// source is what one says, and what it has said.
type source struct {
	all  []told
	over Over
}

// told is a statement, and when it is to be told next. It is kept for a time after its end, to count how often it comes back.
type told struct {
	Statement
	next time.Time
	// gone is since when it does not hold, or zero.
	gone  time.Time
	ended bool
	back  int
}

// NewBoard makes a Board.
func NewBoard(tell Tell) *Board { return &Board{tell: tell, sources: map[string]*source{}} }

// Say takes all that a source knows to hold now, and tells what is due of all sources: some say something all the time. Over is
// optional.
func (b *Board) Say(ctx context.Context, name string, now []Statement, over Over) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sources[name] == nil {
		b.sources[name] = &source{}
	}
	b.sources[name].take(now, over)
	for _, s := range b.sources {
		due := s.due(time.Now())
		for i := range due {
			logger := klog.FromContext(ctx)
			if due[i].Claim != (claim.Ref{}) {
				logger = logger.V(2)
			}
			logger.Info("Event", "event", due[i].String())
		}
		b.tell(ctx, due...)
	}
}

// SayOne takes what holds now of a reason of which there is one event at a time. Without a text nothing does.
func (b *Board) SayOne(ctx context.Context, e Event) {
	var now []Statement
	if e.Text != "" {
		now = []Statement{{Event: e}}
	}
	b.Say(ctx, e.Reason, now, nil)
}

func (s *source) take(now []Statement, over Over) {
	s.over = over
	for i := range s.all {
		if s.all[i].gone.IsZero() {
			s.all[i].gone = time.Now()
		}
	}
	for _, one := range now {
		if one.Key == nil {
			one.Key = one.Text
		}
		at := slices.IndexFunc(s.all, func(t told) bool { return t.Key == one.Key })
		if at < 0 {
			s.all = append(s.all, told{Statement: one})
			continue
		}
		is := &s.all[at]
		is.Statement, is.gone = one, time.Time{}
		if is.ended {
			is.ended, is.back, is.next = false, is.back+1, time.Time{}
		}
	}
}

// due returns what is to be told at a time, and forgets what has long been over.
func (s *source) due(now time.Time) (due []Event) {
	again := now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret; the same for what begins together
	for i := range s.all {
		switch is := &s.all[i]; {
		case is.gone.IsZero():
			if is.next.IsZero() || is.eventType() == corev1.EventTypeWarning && !now.Before(is.next) {
				due = append(due, is.Event)
				is.next = again
			}
		case !is.ended && (is.back < often || now.Sub(is.gone) >= calm):
			is.ended = true
			if s.over == nil {
				continue
			}
			if e, told := s.over(is.Statement); told {
				due = append(due, e)
			}
		}
	}
	s.all = slices.DeleteFunc(s.all, func(t told) bool { return t.ended && now.Sub(t.gone) >= calm })
	return join(due)
}
