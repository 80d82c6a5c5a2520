// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package events tells people what happens to the GPUs of a node, in Events of Kubernetes.
//
//	notifier.go  decides which events are due: it compares what holds now with the events that were made
//	recorder.go  writes them: about the node, about claims, and about the pods that use them
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
	// repeatAfter is the time between two events about something that lasts, less up to repeatJitter, so that not all nodes repeat
	// theirs at the same time. API servers keep events for an hour by default.
	repeatAfter, repeatJitter = 50 * time.Minute, 10 * time.Minute
	// calm is how long something that comes back again and again must be gone to be over.
	calm, often = 10 * time.Minute, 3
)

// Tell writes events, and does not block.
type Tell func(ctx context.Context, events ...Event)

// Statement is something that holds now, and its event. Warnings are repeated as long as they hold, others are written once.
type Statement struct {
	Event
	// Key identifies it among the statements of its source, so that another text alone makes no new event. It is comparable; by
	// default the text is the key.
	Key any
}

// Over returns the event that something does not hold any more, if there is to be one.
type Over func(was Statement) (e Event, is bool)

// Notifier makes events of what holds now, as its sources say: when it begins, while it lasts, and when it is over. It keeps this in
// memory only: after a restart there are events again about what holds.
type Notifier struct {
	tell Tell

	mu  sync.Mutex
	all []tracked
}

// tracked is a statement of a source, and when its event is due next. It is kept for a time after its end, to count how often it
// comes back.
type tracked struct {
	Statement
	source string
	over   Over
	next   time.Time
	// gone is since when it does not hold, or zero.
	gone  time.Time
	ended bool
	back  int
}

// NewNotifier makes a Notifier.
func NewNotifier(tell Tell) *Notifier { return &Notifier{tell: tell} }

// Set replaces the statements of a source, and writes the events that are due, also those of other sources: there is no timer, as
// some source calls it all the time. Over is optional.
func (n *Notifier) Set(ctx context.Context, source string, now []Statement, over Over) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.take(source, now, over)
	due := n.due(time.Now())
	for i := range due {
		logger := klog.FromContext(ctx)
		if due[i].Claim != (claim.Ref{}) {
			logger = logger.V(2)
		}
		logger.Info("Event", "event", due[i].String())
	}
	n.tell(ctx, due...)
}

// Say is Set for a source with one event of the node at a time, which is named after its reason. Without a text nothing holds.
func (n *Notifier) Say(ctx context.Context, reason, text string) {
	var now []Statement
	if text != "" {
		now = []Statement{{Event: Event{Reason: reason, Text: text}}}
	}
	n.Set(ctx, reason, now, nil)
}

func (n *Notifier) take(source string, now []Statement, over Over) {
	for i := range n.all {
		if is := &n.all[i]; is.source == source {
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
		at := slices.IndexFunc(n.all, func(t tracked) bool { return t.source == source && t.Key == one.Key })
		if at < 0 {
			n.all, at = append(n.all, tracked{source: source, over: over}), len(n.all)
		}
		is := &n.all[at]
		is.Statement, is.gone = one, time.Time{}
		if is.ended {
			is.ended, is.back, is.next = false, is.back+1, time.Time{}
		}
	}
}

// due returns the events that are due at a time, and forgets what has long been over.
func (n *Notifier) due(now time.Time) (due []Event) {
	again := now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret; the same for what begins together
	for i := range n.all {
		switch is := &n.all[i]; {
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
			if e, isOver := is.over(is.Statement); isOver {
				due = append(due, e)
			}
		}
	}
	n.all = slices.DeleteFunc(n.all, func(t tracked) bool { return t.ended && now.Sub(t.gone) >= calm })
	return join(due)
}

// Event is something that people should read.
type Event struct {
	// Claim is the claim that it is about; pods that use the claim get the event, too. The zero value is the node.
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

// join makes one event of those that differ only in their GPUs or devices.
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
