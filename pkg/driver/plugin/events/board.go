// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package events tells people what happens to the GPUs of a node, in Events of Kubernetes.
//
//	board.go     what is told, and when: it compares what holds now with what was told
//	recorder.go  writes it: about the node, about claims, and about the pods that use them
package events

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/util/quote"
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

	mu  sync.Mutex
	all []told
}

// told is what a source says, or has said, and when it is to be told next. It is kept for a time after its end, to count how often it
// comes back.
type told struct {
	Statement
	source string
	over   Over
	next   time.Time
	// gone is since when it does not hold, or zero.
	gone  time.Time
	ended bool
	back  int
}

// NewBoard makes a Board.
func NewBoard(tell Tell) *Board { return &Board{tell: tell} }

// Say takes all that a source knows to hold now, and tells what is due of all sources: some say something all the time. Over is
// optional.
func (b *Board) Say(ctx context.Context, source string, now []Statement, over Over) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(source, now, over)
	due := b.due(time.Now())
	for i := range due {
		logger := klog.FromContext(ctx)
		if due[i].Claim != (claim.Ref{}) {
			logger = logger.V(2)
		}
		logger.Info("Event", "event", due[i].String())
	}
	b.tell(ctx, due...)
}

// SayOne takes what holds now of a reason of which there is one event at a time. Without a text nothing does.
func (b *Board) SayOne(ctx context.Context, e Event) {
	var now []Statement
	if e.Text != "" {
		now = []Statement{{Event: e}}
	}
	b.Say(ctx, e.Reason, now, nil)
}

func (b *Board) take(source string, now []Statement, over Over) {
	for i := range b.all {
		if is := &b.all[i]; is.source == source {
			is.over = over
			if is.gone.IsZero() {
				is.gone = time.Now()
			}
		}
	}
	for _, one := range now {
		if one.Key == nil {
			one.Key = one.Text
		}
		at := slices.IndexFunc(b.all, func(t told) bool { return t.source == source && t.Key == one.Key })
		if at < 0 {
			b.all, at = append(b.all, told{source: source, over: over}), len(b.all)
		}
		is := &b.all[at]
		is.Statement, is.gone = one, time.Time{}
		if is.ended {
			is.ended, is.back, is.next = false, is.back+1, time.Time{}
		}
	}
}

// due returns what is to be told at a time, and forgets what has long been over.
func (b *Board) due(now time.Time) (due []Event) {
	again := now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret; the same for what begins together
	for i := range b.all {
		switch is := &b.all[i]; {
		case is.gone.IsZero():
			if is.next.IsZero() || is.eventType() == corev1.EventTypeWarning && !now.Before(is.next) {
				due = append(due, is.Event)
				is.next = again
			}
		case !is.ended && (is.back < often || now.Sub(is.gone) >= calm):
			is.ended = true
			if is.over == nil {
				continue
			}
			if e, told := is.over(is.Statement); told {
				due = append(due, e)
			}
		}
	}
	b.all = slices.DeleteFunc(b.all, func(t told) bool { return t.ended && now.Sub(t.gone) >= calm })
	return join(due)
}

// Event is something that people should read.
type Event struct {
	// Claim is the claim that it is about, which the pods that use it are told, too. The zero value is the node.
	Claim claim.Ref
	// Type is corev1.EventTypeWarning if it is empty.
	Type   string
	Reason string
	// Subjects are the GPUs of the node, by PCI address, or the devices of the claim that it is about. The message begins with
	// them. Without any the text says what it is about.
	Subjects []string
	// Text says what has happened and what to do.
	Text string
}

func (e *Event) eventType() string { return cmp.Or(e.Type, corev1.EventTypeWarning) }

// Message is the text of the event.
func (e *Event) Message() string {
	var subject string
	switch {
	case len(e.Subjects) > 0 && e.Claim == (claim.Ref{}):
		subject = quote.Plural("GPU", e.Subjects)
	case len(e.Subjects) > 0:
		subject = quote.Plural("device", e.Subjects)
	case e.Claim.Name == "" && e.Claim.UID != "": // its name is not known
		subject = "claim with UID " + quote.Name(e.Claim.UID)
	default:
		return e.Text
	}
	return strings.ToUpper(subject[:1]) + subject[1:] + ": " + e.Text
}

// String is for tests and logs.
func (e *Event) String() string {
	text := e.Reason + ": " + e.Message()
	if e.Claim.Name != "" {
		text = e.Claim.Name + ": " + text
	}
	return text
}

// join makes one event of those that say the same of several GPUs or devices.
func join(all []Event) (joined []Event) {
	for _, e := range all {
		at := slices.IndexFunc(joined, func(j Event) bool {
			return j.Claim == e.Claim && j.Type == e.Type && j.Reason == e.Reason && j.Text == e.Text && len(j.Subjects) > 0 && len(e.Subjects) > 0
		})
		if at < 0 {
			joined = append(joined, e)
			continue
		}
		subjects := slices.Concat(joined[at].Subjects, e.Subjects)
		slices.Sort(subjects)
		joined[at].Subjects = slices.Compact(subjects)
	}
	return joined
}
