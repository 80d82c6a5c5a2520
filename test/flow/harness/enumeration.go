// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"flag"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Enumeration counts the cases of a test that goes through everything of a kind, so
// that it cannot shrink unnoticed.
type Enumeration struct {
	noun  string
	mu    sync.Mutex
	cases map[string]int
}

// Enumerate returns an enumeration that fails the test in the end if it had fewer
// cases than least, which is about four fifths of what there are today.
func Enumerate(t *testing.T, noun string, least int) *Enumeration {
	t.Helper()
	e := &Enumeration{noun: noun, cases: map[string]int{}}
	t.Cleanup(func() {
		t.Log(e)
		if all := e.total(); all < least && !t.Failed() && !t.Skipped() && runsWhole() {
			t.Errorf("%d %s, want at least %d: does the test still find them?", all, noun, least)
		}
	})
	return e
}

// runsWhole reports whether -test.run does not choose among subtests.
func runsWhole() bool {
	return !strings.Contains(flag.Lookup("test.run").Value.String(), "/") && flag.Lookup("test.skip").Value.String() == ""
}

func (e *Enumeration) Add(kind string) { e.AddAll(kind, 1) }

func (e *Enumeration) AddAll(kind string, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cases[kind] += n
}

func (e *Enumeration) total() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := 0
	for _, n := range e.cases {
		all += n
	}
	return all
}

func (e *Enumeration) String() string {
	all := e.total()
	e.mu.Lock()
	defer e.mu.Unlock()
	var lines []string
	for kind, n := range e.cases {
		lines = append(lines, Itoa(n)+" "+kind)
	}
	slices.Sort(lines)
	return Itoa(all) + " " + e.noun + ": " + strings.Join(lines, "; ")
}
