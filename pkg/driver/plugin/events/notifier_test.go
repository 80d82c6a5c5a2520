// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// listener remembers what it was told, and when.
type listener struct {
	mu    sync.Mutex
	told  []string
	times map[string][]time.Time
}

func (l *listener) Tell(_ context.Context, all ...Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range all {
		text := all[i].String()
		l.told = append(l.told, text)
		if l.times == nil {
			l.times = map[string][]time.Time{}
		}
		l.times[text] = append(l.times[text], time.Now())
	}
}

// news returns what was told since the last call.
func (l *listener) news() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	news := l.told
	l.told = nil
	return news
}

// on is a statement about GPUs.
func on(key, reason, text string, gpus ...string) Statement {
	return Statement{Key: key, Event: Event{Reason: reason, Subjects: gpus, Text: text}}
}

// saySomething is another source, as there are some that say something all the time.
func saySomething(ctx context.Context, n *Notifier) {
	wait.UntilWithContext(ctx, func(ctx context.Context) { n.Set(ctx, "all the time", nil, nil) }, time.Minute)
}

// TestNotifier tells what begins and what is over, once, whatever the words, and what is the same of several GPUs together.
func TestNotifier(t *testing.T) {
	t.Parallel()
	l := &listener{}
	n := NewNotifier(l.Tell)
	over := func(was Statement) (Event, bool) {
		return Event{Type: corev1.EventTypeNormal, Reason: "Over", Subjects: was.Subjects, Text: "it is over"}, was.Reason != "Silent"
	}
	lost := func(gpu string) Statement { return on("lost "+gpu, "Lost", "it fell off", gpu) }
	reworded := lost("a")
	reworded.Text = "it fell off, in other words"
	for i, step := range []struct {
		source string
		now    []Statement
		want   []string
	}{
		{"one", nil, nil},
		{"one", []Statement{lost("a")}, []string{"Lost: GPU a: it fell off"}},
		{"one", []Statement{reworded}, nil},
		{"other", []Statement{lost("a")}, []string{"Lost: GPU a: it fell off"}},
		{"other", nil, []string{"Over: GPU a: it is over"}},
		{"one", []Statement{reworded, lost("b"), lost("c"), lost("c")}, []string{"Lost: GPUs b, c: it fell off"}},
		{"one", []Statement{on("x", "Silent", "one", "a"), on("y", "Silent", "two", "a")}, []string{"Over: GPUs a, b, c: it is over", "Silent: GPU a: one", "Silent: GPU a: two"}},
		{"one", nil, nil},
		{"one", []Statement{{Event: Event{Reason: "Node", Text: "text"}}, {Event: Event{Reason: "Node", Text: "text"}}}, []string{"Node: text"}},
		{"one", []Statement{{Event: Event{Reason: "Node", Text: "other text"}}}, []string{"Over: it is over", "Node: other text"}},
	} {
		n.Set(t.Context(), step.source, step.now, over)
		if diff := cmp.Diff(step.want, l.news(), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("step %d: events (-want +got):\n%s", i, diff)
		}
	}
}

// TestNotifierRepeats what lasts, before API servers forget it and not much more often, and with its last words.
func TestNotifierRepeats(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &listener{}
		n := NewNotifier(l.Tell)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go saySomething(ctx, n)
		normal := on("normal", "Normal", "told once", "a")
		normal.Type = corev1.EventTypeNormal
		n.Set(ctx, "source", []Statement{on("short", "Short", "first", "a"), on("long", "Long", "it lasts", "a"), normal}, nil)
		time.Sleep(time.Minute)
		n.Set(ctx, "source", []Statement{on("short", "Short", "last", "a"), on("long", "Long", "it lasts", "a"), normal}, nil)
		time.Sleep(50 * time.Minute)
		n.Set(ctx, "source", []Statement{on("long", "Long", "it lasts", "a"), normal}, nil)
		// What began together is repeated together.
		n.Set(ctx, "another", []Statement{on("a", "Both", "it lasts", "a"), on("b", "Both", "it lasts", "b")}, nil)
		const hours = 10
		time.Sleep(hours * time.Hour)
		synctest.Wait()
		l.mu.Lock()
		defer l.mu.Unlock()
		for text, want := range map[string][2]int{
			"Short: GPU a: first": {1, 1}, "Short: GPU a: last": {1, 1}, "Normal: GPU a: told once": {1, 1}, "Long: GPU a: it lasts": {hours, 2 * hours},
			"Both: GPUs a, b: it lasts": {hours, 2 * hours}, "Both: GPU a: it lasts": {}, "Both: GPU b: it lasts": {},
		} {
			if times := l.times[text]; len(times) < want[0] || len(times) > want[1] {
				t.Errorf("%s: told %d times, want %v", text, len(times), want)
			}
		}
		for i, times := 1, l.times["Long: GPU a: it lasts"]; i < len(times); i++ {
			if d := times[i].Sub(times[i-1]); d > 55*time.Minute || d < 30*time.Minute {
				t.Errorf("repeated after %s", d)
			}
		}
	})
}

// TestCalm: what comes and goes is told a few times, and then to be over when it has been away for long enough.
func TestCalm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &listener{}
		n := NewNotifier(l.Tell)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go saySomething(ctx, n)
		hot := on("hot", "Hot", "it is hot", "a")
		over := func(was Statement) (Event, bool) {
			return Event{Type: corev1.EventTypeNormal, Reason: "Over", Subjects: was.Subjects, Text: "it is over"}, true
		}
		want := func(when string, want ...string) {
			t.Helper()
			synctest.Wait()
			if diff := cmp.Diff(want, l.news(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: events (-want +got):\n%s", when, diff)
			}
		}
		const begins, ends = "Hot: GPU a: it is hot", "Over: GPU a: it is over"
		n.Set(ctx, "source", []Statement{hot}, over)
		want("at first", begins)
		for range 8 {
			time.Sleep(time.Minute)
			n.Set(ctx, "source", nil, over)
			n.Set(ctx, "source", nil, over)
			time.Sleep(time.Minute)
			n.Set(ctx, "source", []Statement{hot}, over)
		}
		want("while it comes and goes", ends, begins, ends, begins, ends, begins)
		n.Set(ctx, "source", nil, over)
		time.Sleep(9 * time.Minute)
		want("for nine minutes")
		time.Sleep(2 * time.Minute)
		want("for eleven", ends)
		n.Set(ctx, "source", nil, over)
		want("afterwards")
		n.Set(ctx, "source", []Statement{hot}, over)
		n.Set(ctx, "source", nil, over)
		want("long after", begins, ends)
	})
}

func TestMessage(t *testing.T) {
	t.Parallel()
	for want, e := range map[string]Event{
		"text":                            {Text: "text"},
		"GPU a: text":                     {Subjects: []string{"a"}, Text: "text"},
		"Devices a, b: text":              {Claim: ref("one"), Subjects: []string{"a", "b"}, Text: "text"},
		"Claim with UID uid-of-two: text": {Claim: claim.Ref{UID: "uid-of-two"}, Text: "text"},
	} {
		if got := e.Message(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
