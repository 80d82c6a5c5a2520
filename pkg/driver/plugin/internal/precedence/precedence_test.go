// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package precedence

import (
	"path/filepath"
	"sync"
	"testing"
)

func newest(t *testing.T, p *Precedence) bool {
	t.Helper()
	mine, err := p.Mine()
	if err != nil {
		t.Fatal(err)
	}
	return mine
}

// TestPrecedence: of those that run the one that began last has precedence.
func TestPrecedence(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	first, second, third := New(path), New(path), New(path)
	// One that begins is given first.
	check := func(step string, want *Precedence, running ...*Precedence) {
		t.Helper()
		for i, p := range running {
			if newest(t, p) != (p == want) {
				t.Errorf("%s: instance %d of those that run: newest is %v", step, i, p != want)
			}
			if p.Superseded() != (p != want) {
				t.Errorf("%s: instance %d of those that run is superseded: %v", step, i, p == want)
			}
		}
	}
	check("one runs", first, first)
	check("a second one begins", second, second, first)
	check("a third one begins", third, third, second, first)
	second.End()
	check("the second ends", third, third, first)
	check("it begins again", second, second, third, first)
	third.End()
	second.End()
	check("only the first is left", first, first)
	first.End()
	if first.Superseded() {
		t.Error("one that has ended is superseded")
	}
	check("a new one", third, third)
	third.End()

	if _, err := New(filepath.Join(path, "no folder")).Mine(); err == nil {
		t.Error("a file that cannot be made is no error")
	}
}

// TestPrecedenceAtOnce: however many begin at the same time, one is the newest.
func TestPrecedenceAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	all := make([]Precedence, 20)
	var running sync.WaitGroup
	for i := range all {
		all[i].path = path
		running.Go(func() {
			if _, err := all[i].Mine(); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
	number := 0
	for i := range all {
		if newest(t, &all[i]) {
			number++
		}
	}
	if number != 1 {
		t.Errorf("%d instances are the newest", number)
	}
}
