// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"flag"
	"slices"
	"strings"
	"sync"
	"testing"
)

// enumeration counts the cases of a test that goes through everything of a kind, so
// that it cannot shrink unnoticed.
type enumeration struct {
	noun  string
	mu    sync.Mutex
	cases map[string]int
}

// enumerate returns an enumeration that fails the test in the end if it had fewer
// cases than least, which is about four fifths of what there are today.
func enumerate(t *testing.T, noun string, least int) *enumeration {
	t.Helper()
	e := &enumeration{noun: noun, cases: map[string]int{}}
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

func (e *enumeration) add(kind string) { e.addAll(kind, 1) }

func (e *enumeration) addAll(kind string, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cases[kind] += n
}

func (e *enumeration) total() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := 0
	for _, n := range e.cases {
		all += n
	}
	return all
}

func (e *enumeration) String() string {
	all := e.total()
	e.mu.Lock()
	defer e.mu.Unlock()
	var lines []string
	for kind, n := range e.cases {
		lines = append(lines, itoa(n)+" "+kind)
	}
	slices.Sort(lines)
	return itoa(all) + " " + e.noun + ": " + strings.Join(lines, "; ")
}
