// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// TestPolicySpread: a node follows a changed policy when it is its turn.
func TestPolicySpread(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	synctest.Test(t, func(t *testing.T) {
		const over = 30 * time.Minute
		f := NewPolicyFile(path, over)
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		expect := func(when string, clients int) {
			t.Helper()
			if got, err := f.Read(t.Context()); err != nil || got.Default.MPS.Clients != clients {
				t.Errorf("%s: %+v, %v, want %d", when, got, err, clients)
			}
		}
		write(goodPolicy("1"))
		expect("the first policy", 1)

		write(goodPolicy("2"))
		expect("a change", 1)
		turn := time.Until(f.turn)
		if turn <= 0 || turn >= over {
			t.Fatalf("the node follows after %s of %s", turn, over)
		}
		time.Sleep(turn / 2)
		write(goodPolicy("3"))
		expect("another change", 1)
		time.Sleep(time.Until(f.turn) - 1)
		expect("just before its turn", 1)
		time.Sleep(time.Nanosecond)
		expect("at its turn", 3)
		expect("later", 3)

		write(goodPolicy("2"))
		expect("the next change", 3)
		write(goodPolicy("3"))
		expect("changed back", 3)
		if !f.turn.IsZero() {
			t.Errorf("waits until %s", f.turn)
		}

		write(goodPolicy("2"))
		expect("a change", 3)
		write("odd")
		if got, err := f.Read(t.Context()); err == nil || got != nil {
			t.Errorf("invalid: %p, %v", got, err)
		}
		time.Sleep(over)
		write(goodPolicy("2"))
		expect("valid again", 3)
		time.Sleep(over)
		expect("after its turn", 2)
	})
}

// TestPolicySpreadOverTime: nodes that wait are spread over the time, and without one none waits.
func TestPolicySpreadOverTime(t *testing.T) {
	const nodes = 300
	path := filepath.Join(t.TempDir(), "policy.yaml")
	for _, over := range []time.Duration{0, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			perMinute := map[int]int{}
			for range nodes {
				f := NewPolicyFile(path, over)
				for _, clients := range []string{"1", "2"} {
					if err := os.WriteFile(path, []byte(goodPolicy(clients)), 0o600); err != nil {
						t.Fatal(err)
					}
					if _, err := f.Read(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if f.turn.IsZero() {
					perMinute[0]++
				} else {
					perMinute[int(time.Until(f.turn).Minutes())]++
				}
			}
			most := 0
			for _, n := range perMinute {
				most = max(most, n)
			}
			if over == 0 && most != nodes || over > 0 && (len(perMinute) < 40 || most > nodes/10) {
				t.Errorf("over %s: in each minute follow %v", over, perMinute)
			}
		})
	}
}
