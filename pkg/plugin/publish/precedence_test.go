// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"path/filepath"
	"sync"
	"testing"
)

func newest(t *testing.T, p *precedence) bool {
	t.Helper()
	mine, err := p.mine()
	if err != nil {
		t.Fatal(err)
	}
	return mine
}

// TestPrecedence: of those that run the one that began last has precedence.
func TestPrecedence(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "publish.lock")
	first, second, third := &precedence{path: path}, &precedence{path: path}, &precedence{path: path}
	// One that begins is given first.
	check := func(step string, want *precedence, running ...*precedence) {
		t.Helper()
		for i, p := range running {
			if newest(t, p) != (p == want) {
				t.Errorf("%s: instance %d of those that run: newest is %v", step, i, p != want)
			}
		}
	}
	check("one runs", first, first)
	check("a second one begins", second, second, first)
	check("a third one begins", third, third, second, first)
	second.end()
	check("the second ends", third, third, first)
	check("it begins again", second, second, third, first)
	third.end()
	second.end()
	check("only the first is left", first, first)
	first.end()
	check("a new one", third, third)
	third.end()

	if (&precedence{}).file != nil || !newest(t, &precedence{}) {
		t.Error("without a file there is another instance")
	}
	if _, err := (&precedence{path: filepath.Join(path, "no folder")}).mine(); err == nil {
		t.Error("a file that cannot be made is no error")
	}
}

// TestPrecedenceAtOnce: however many begin at the same time, one is the newest.
func TestPrecedenceAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "publish.lock")
	all := make([]precedence, 20)
	var running sync.WaitGroup
	for i := range all {
		all[i].path = path
		running.Go(func() {
			if _, err := all[i].mine(); err != nil {
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
