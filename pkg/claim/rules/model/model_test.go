// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"flag"
	"testing"

	"github.com/partage-dev/partage/pkg/claim/rules"
)

var limit = flag.Int("model.states", 8_000, "how many states of a scenario to visit at most")

// TestScenarios explores the rules in every small world. Each has more states than are visited here; -model.states=4000000
// visits all of them, but for the two largest.
func TestScenarios(t *testing.T) {
	all := Scenarios()
	if want := 26; len(all) != want {
		t.Errorf("%d scenarios, want %d", len(all), want)
	}
	states, transitions := 0, 0
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			r := Explore(s, rules.Decide, *limit)
			t.Log(r)
			states, transitions = states+r.States, transitions+r.Transitions
			switch {
			case r.Broken != "":
				t.Errorf("%s\n%s", r.Broken, r.Print())
			case r.States != *limit && (!r.Complete || r.States < smallest):
				t.Errorf("visited %d states of at most %d, so that the exploration has stopped early", r.States, *limit)
			}
		})
	}
	t.Logf("%d states, %d transitions", states, transitions)
}

// smallest is less than any scenario has.
const smallest = 20_000
