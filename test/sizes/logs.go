// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sizes

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Cases are what an enumeration said of itself.
type Cases struct {
	Test  string
	Count int
	// What was counted: "cases", "crashes", "seeds".
	What string
}

var (
	counted = regexp.MustCompile(`^\s+[\w-]+\.go:\d+: (?:.*?[^\w,])??(\d+)(?: of \d+)? ((?:[a-z]+ )??(?:cases|crashes|faults|seeds|calls|looks|files|slices))\b`)
	running = regexp.MustCompile(`^=== (?:RUN|CONT|NAME)\s+(\S+)`)
)

// casesIn finds what enumerations say in the output of go test -v.
func casesIn(log string) []Cases {
	var all []Cases
	test := ""
	for line := range strings.Lines(log) {
		if m := running.FindStringSubmatch(line); m != nil {
			test = m[1]
		} else if m := counted.FindStringSubmatch(line); m != nil {
			n, err := strconv.Atoi(m[1])
			if err == nil {
				all = append(all, Cases{Test: test, Count: n, What: m[2]})
			}
		}
	}
	return all
}

// Step is a part of `make test`.
type Step struct {
	Name string
	Took time.Duration
}

// last is the last step of a run that passed.
const last = "all tests passed"

// stepsIn returns when make test began, and its steps; none if it has not passed. Each line of the file, which begins anew with
// each run, has a Unix time, a tab, and the step that began then.
func stepsIn(file string) (began time.Time, steps []Step, err error) {
	var since time.Time
	for line := range strings.Lines(file) {
		seconds, name, _ := strings.Cut(strings.TrimSpace(line), "\t")
		unix, err := strconv.ParseInt(seconds, 10, 64)
		if err != nil {
			return began, nil, fmt.Errorf("a line of the steps of make is %q, want a Unix time, a tab and a name", line)
		}
		at := time.Unix(unix, 0)
		if len(steps) == 0 {
			began = at
		} else {
			steps[len(steps)-1].Took = at.Sub(since)
		}
		if name == last {
			return began, steps, nil
		}
		name, _, _ = strings.Cut(name, ":")
		steps, since = append(steps, Step{Name: name}), at
	}
	return began, nil, nil
}

// suiteEnd is what test/e2e/run says of a suite.
var suiteEnd = regexp.MustCompile(`(?m)^(\w+) +ok, (\d+) s$`)

// suitesIn finds how long the cluster suites took, which run side by side.
func suitesIn(log string) []Step {
	var all []Step
	for _, m := range suiteEnd.FindAllStringSubmatch(log, -1) {
		if seconds, err := strconv.Atoi(m[2]); err == nil {
			all = append(all, Step{Name: "cluster suite " + m[1], Took: time.Duration(seconds) * time.Second})
		}
	}
	return all
}
