// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/policy"
)

// TestPolicySpread: a node follows a changed policy when it is its turn.
func TestPolicySpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const over = 30 * time.Minute
		source := &fakePolicy{}
		s := NewPolicySpread(source, over)
		expect := func(when string, want *policy.Policy) {
			t.Helper()
			if got, err := s.Read(t.Context()); err != nil || got != want {
				t.Errorf("%s: %p, %v, want %p", when, got, err, want)
			}
		}
		first, second, third := onlyWhole(), withoutShares(), policy.Builtin()
		source.set(first, nil)
		expect("the first policy", first)

		source.set(second, nil)
		expect("a change", first)
		turn := time.Until(s.at)
		if turn <= 0 || turn >= over {
			t.Fatalf("the node follows after %s of %s", turn, over)
		}
		time.Sleep(turn / 2)
		source.set(third, nil)
		expect("another change", first)
		time.Sleep(time.Until(s.at) - 1)
		expect("just before its turn", first)
		time.Sleep(time.Nanosecond)
		expect("at its turn", third)
		expect("later", third)

		source.set(second, nil)
		expect("the next change", third)
		source.set(policy.Builtin(), nil)
		if got, err := s.Read(t.Context()); err != nil || got == third || !s.at.IsZero() {
			t.Errorf("changed back: %p, %v, waits until %s", got, err, s.at)
		}

		source.set(second, nil)
		expect("a change", s.current)
		source.set(nil, errors.New("odd"))
		if got, err := s.Read(t.Context()); err == nil || got != nil {
			t.Errorf("invalid: %p, %v", got, err)
		}
		time.Sleep(over)
		source.set(second, nil)
		expect("valid again", s.current)
		time.Sleep(over)
		expect("after its turn", second)
	})
}

// TestPolicySpreadOverTime: nodes that wait are spread over the time, and without one none waits.
func TestPolicySpreadOverTime(t *testing.T) {
	const nodes = 1_000
	for _, over := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			perMinute := map[int]int{}
			for range nodes {
				s := NewPolicySpread(&fakePolicy{current: onlyWhole()}, over)
				_, err := s.Read(t.Context())
				s.source = &fakePolicy{current: withoutShares()}
				if _, later := s.Read(t.Context()); err != nil || later != nil {
					t.Fatal(err, later)
				}
				if s.at.IsZero() {
					perMinute[0]++
				} else {
					perMinute[int(time.Until(s.at).Minutes())]++
				}
			}
			most := 0
			for _, n := range perMinute {
				most = max(most, n)
			}
			if over == 0 && most != nodes || over > 0 && (len(perMinute) < 50 || most > nodes/10) {
				t.Errorf("over %s: in each minute follow %v", over, perMinute)
			}
		})
	}
}
