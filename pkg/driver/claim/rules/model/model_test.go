// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"flag"
	"testing"

	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// shortRun is how many states of a scenario are visited where nothing else is said.
const shortRun = 8_000

var limit = flag.Int("model.states", shortRun, "how many states of a scenario to visit at most")

// TestScenarios explores the rules in every small world. Most have more states than are visited here, see make test-model.
func TestScenarios(t *testing.T) {
	all := Scenarios()
	if want := 53; len(all) != want {
		t.Errorf("%d scenarios, want %d", len(all), want)
	}
	states, transitions := 0, 0
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			r := Explore(s, rules.Decide, *limit)
			t.Log(r)
			states, transitions = states+r.States, transitions+r.Transitions
			if r.Broken != "" {
				t.Fatalf("%s\n%s", r.Broken, r.Print())
			}
			checkStates(t, s, r)
		})
	}
	t.Logf("%d states, %d transitions", states, transitions)
}

// checkStates makes sure that an exploration has not stopped early: it visits as many states as it may, or all.
func checkStates(t *testing.T, s *Scenario, r Result) {
	t.Helper()
	switch {
	case s.States > 0 && s.States <= *limit:
		if r.States != s.States || !r.Complete {
			t.Errorf("visited %d states, complete=%t, of %d", r.States, r.Complete, s.States)
		}
	case r.Complete && r.States <= min(shortRun, *limit):
		t.Errorf("there are only %d states: note it as the scenario's number of States", r.States)
	case !r.Complete && r.States != *limit:
		t.Errorf("visited %d states of at most %d", r.States, *limit)
	}
}
