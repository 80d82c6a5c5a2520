// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// allVariable makes enumerations run all of their cases.
	allVariable = "PARTAGE_TEST_ALL"
	// sampleVariable chooses the sample of the cases that run otherwise.
	sampleVariable = "PARTAGE_TEST_SAMPLE"
	// samples is how many samples together are all cases.
	samples = 19
)

// Sample is a part of the cases of each enumeration, evenly spread. Samples whose
// numbers follow each other have different cases; any nineteen have all.
type Sample struct {
	all    bool
	number int
}

// TheSample is what this run of the tests takes.
var TheSample = sync.OnceValue(func() Sample {
	if all, _ := strconv.ParseBool(os.Getenv(allVariable)); all {
		return Sample{all: true}
	}
	if number, err := strconv.Atoi(os.Getenv(sampleVariable)); err == nil && number >= 0 {
		return Sample{number: number}
	}
	// Another one every hour.
	return Sample{number: int(time.Now().Unix() / 3600)}
})

func (s Sample) String() string {
	if s.all {
		return "all cases"
	}
	return fmt.Sprintf("one case of %d; %s=%d has the same again, %s=1 has all", samples, sampleVariable, s.number, allVariable)
}

// All reports whether the sample has all cases.
func (s Sample) All() bool { return s.all }

// Has reports whether the sample has the case with this number.
func (s Sample) Has(i int) bool { return s.all || i%samples == s.number%samples }

// Way chooses one of several ways to run a case. In later samples the case runs in
// the other ways.
func (s Sample) Way(i, ways int) int {
	if s.all {
		return i % ways
	}
	return (i/samples + s.number/samples) % ways
}

// Enumeration counts the cases of a test that goes through everything of a kind, so
// that it cannot shrink unnoticed.
type Enumeration struct {
	noun string

	mu  sync.Mutex
	ran map[string]int
	// found are all cases, also those that are not in the sample.
	found int
}

// Enumerate returns an enumeration that fails the test in the end if it found fewer
// cases than least, which is about four fifths of what there are today.
func Enumerate(t *testing.T, noun string, least int) *Enumeration {
	t.Helper()
	e := &Enumeration{noun: noun, ran: map[string]int{}}
	t.Cleanup(func() {
		t.Log(e)
		if t.Failed() || t.Skipped() || !runsWhole() {
			return
		}
		if e.found < least {
			t.Errorf("%d %s were found, want at least %d: what does the test not see any more?", e.found, noun, least)
		}
		least := e.found / (2 * samples)
		if TheSample().all {
			least = e.found
		}
		if ran := e.total(); ran < least || ran == 0 {
			t.Errorf("%d %s of %d ran, want at least %d", ran, noun, e.found, least)
		}
	})
	return e
}

// runsWhole reports whether the flags of the test program choose no subtests.
func runsWhole() bool {
	return !strings.Contains(flag.Lookup("test.run").Value.String(), "/") && flag.Lookup("test.skip").Value.String() == ""
}

// Find counts a case, and reports whether it is to run: whether the sample has it.
func (e *Enumeration) Find(i int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.found++
	return TheSample().Has(i)
}

// Ran counts a case that ran.
func (e *Enumeration) Ran(kind string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ran[kind]++
}

// Choose counts cases and returns those of the sample, or one of fewer cases than there are samples.
func Choose[Case any](e *Enumeration, cases []Case) []Case {
	var chosen []Case
	for i, c := range cases {
		if e.Find(i) {
			chosen = append(chosen, c)
		}
	}
	if len(chosen) == 0 && len(cases) > 0 {
		chosen = append(chosen, cases[TheSample().number%len(cases)])
	}
	return chosen
}

func (e *Enumeration) total() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := 0
	for _, n := range e.ran {
		all += n
	}
	return all
}

func (e *Enumeration) String() string {
	all := e.total()
	e.mu.Lock()
	defer e.mu.Unlock()
	var lines []string
	for kind, n := range e.ran {
		lines = append(lines, strconv.Itoa(n)+" "+kind)
	}
	slices.Sort(lines)
	text := fmt.Sprintf("%d of %d %s", all, e.found, e.noun)
	if len(lines) > 1 {
		text += ": " + strings.Join(lines, "; ")
	}
	return text
}
