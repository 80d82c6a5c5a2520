// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"flag"
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

var limit = flag.Int("model.states", 600, "states of each scenario that are explored")

var (
	hot0  = source{"hot", 0, "ab", resourceapi.DeviceTaintEffectNone}
	lost0 = source{"lost", 0, "ab", resourceapi.DeviceTaintEffectNoSchedule}
	xid0  = source{"xid", 0, "b", resourceapi.DeviceTaintEffectNoExecute}
	xid1  = source{"xid", 1, "ab", resourceapi.DeviceTaintEffectNoExecute}
)

func times(pairs ...int) (all [faults]int) {
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = pairs[i+1]
	}
	return all
}

var scenarios = []scenario{
	{name: "sources appear and vanish", gpus: 2, sources: []source{hot0, xid0, xid1}, faults: times(flaps, 4)},
	{name: "a thermal storm", gpus: 1, sources: []source{hot0}, flap: true, bound: 1, leak: 3},
	{name: "a flapping fault", gpus: 1, sources: []source{xid0}, flap: true, bound: 3, leak: 1},
	{name: "the API server is away or refuses", fresh: true, gpus: 2, sources: []source{xid0, xid1}, faults: times(flaps, 2, outage, 2, refusal, 2)},
	{name: "kubelet restarts", gpus: 2, sources: []source{xid0}, faults: times(flaps, 1, wipe, 4, blind, 1)},
	{name: "an older server drops counters", gpus: 2, sources: []source{xid0}, drops: "counters", faults: times(flaps, 1, skew, 1, wipe, 1, removal, 1, crash, 1)},
	{name: "an older server drops taints", gpus: 1, sources: []source{lost0, xid0}, drops: "taints", faults: times(flaps, 2, skew, 1, wipe, 1)},
	{name: "etcd is restored", gpus: 1, sources: []source{lost0, hot0}, faults: times(flaps, 2, restore, 1, outage, 1)},
	{name: "watches bring nothing", gpus: 1, sources: []source{lost0}, faults: times(flaps, 1, blind, 2, edit, 1, removal, 1)},
	{name: "others rewrite", gpus: 2, sources: []source{lost0, xid1}, faults: times(flaps, 2, edit, 2, removal, 1, stray, 1)},
	{name: "somebody fights", said: true, gpus: 1, sources: []source{lost0}, faults: times(edit, 12), bound: 2, leak: 3},
	{name: "the node leaves and comes back", gpus: 2, sources: []source{lost0}, faults: times(flaps, 1, leave, 1, outage, 1, crash, 1)},
	{name: "two instances overlap", gpus: 1, sources: []source{lost0}, fresh: true, two: true, faults: times(flaps, 1, upgrade, 2, crash, 2, wipe, 1)},
	{name: "an older server drops shares", gpus: 1, sources: []source{lost0}, shares: true, drops: "shares", faults: times(flaps, 1, skew, 1, wipe, 1, removal, 1)},
	{name: "an API server takes one taint of a device", gpus: 1, few: 1, sources: []source{lost0, xid0}, faults: times(flaps, 6)},
	{name: "observers", gpus: 2, observers: true, sources: []source{lost0, xid1}, drops: "counters", faults: times(flaps, 1, skew, 1, wipe, 1, edit, 1)},
	{name: "several slices of counters", gpus: 2, split: true, sources: []source{xid0}, recounts: true, drops: "counters", faults: times(flaps, 1, policy, 1, skew, 1, removal, 2)},
	{name: "the policy withdraws a device", gpus: 2, sources: []source{xid1}, withdraws: true, faults: times(flaps, 1, policy, 2, crash, 1, removal, 1)},
	{name: "the policy changes counters", gpus: 2, sources: []source{xid1}, recounts: true, faults: times(flaps, 1, policy, 2, crash, 1, removal, 1)},
}

// explored is what an exploration has found.
type explored struct {
	states, transitions, depth, settled int
	// complete means that there are no more.
	complete bool
	slowest  Time
	// broken is the promise that is not kept, with the shortest way there, and what follows without another fault.
	broken     string
	way, after []string
}

// state is one that was visited, and how it was reached.
type state struct {
	world  *world
	parent int
	text   string
}

// explore visits the states of a scenario, breadth first, up to a limit.
func (s *scenario) explore(decide decider, limit int) (r explored) {
	states := []state{{world: s.start(), parent: -1}}
	depth := []int{0}
	seen := map[string]bool{states[0].world.key(): true}
	settled := map[string]bool{}
	way := func(i int) (texts []string) {
		for ; states[i].parent >= 0; i = states[i].parent {
			texts = append([]string{states[i].text}, texts...)
		}
		return texts
	}
	for i := 0; i < len(states) && r.broken == ""; i++ {
		w := states[i].world
		r.depth = depth[i]
		if v := s.rest(w.clone(), decide, settled, &r); v != "" {
			r.broken, r.way = "when all faults are over: "+v, way(i)
			break
		}
		s.successors(w, decide, func(text string, n *world, broken string) {
			r.transitions++
			switch {
			case r.broken != "":
			case broken != "":
				r.broken, r.way = broken, append(way(i), text)
			case len(states) < limit:
				if key := n.key(); !seen[key] {
					seen[key] = true
					states, depth = append(states, state{n, i, text}), append(depth, depth[i]+1)
				}
			}
		})
		states[i].world = nil
	}
	r.states, r.complete = len(states), len(states) < limit
	return r
}

// patience is how many steps it may take until everything is stored, and quiet for how long nothing is written then.
const patience, quiet = 24, 10

// rest asserts that everything is stored when no more faults happen, and stays so without a write.
func (s *scenario) rest(w *world, decide decider, settled map[string]bool, r *explored) string {
	w.left, w.up, w.refuses, w.mixed, w.backedUp = [faults]int{}, true, false, false, true
	w.restored = true
	w.writes, w.registered = -1000, false
	calm := *s
	calm.flap = false
	var on []string
	var took, still Time
	r.after = nil
	for n := 0; still < quiet; n++ {
		if n > 2000 {
			return "it does not come to rest: endless work at one moment"
		}
		if still == 0 {
			key := w.key()
			if settled[key] {
				break
			}
			on = append(on, key)
		}
		var next *world
		var label, broken string
		calm.successors(w, decide, func(text string, n *world, b string) {
			if next == nil {
				next, label, broken = n, text, b
			}
		})
		r.after = append(r.after, label)
		wrong := calm.right(next, next.newest)
		switch {
		case broken != "":
			return broken
		case label != "time passes" && next.version != w.version && still > 0:
			return "something is written although nothing has changed: " + label
		case label == "time passes" && wrong == "":
			took, still = took+1, still+1
		case label == "time passes" && still > 0:
			return "it does not stay so: " + wrong
		case label == "time passes":
			if took++; took > patience {
				return wrong
			}
		}
		w = next
	}
	for _, key := range on {
		settled[key] = true
	}
	r.settled++
	r.slowest = max(r.slowest, took-still)
	return ""
}

func (r *explored) String() string {
	return fmt.Sprintf("%d states, %d transitions, depth %d, %d settled, at rest after %d steps", r.states, r.transitions, r.depth, r.settled, r.slowest)
}

// TestModel visits the states of all scenarios.
func TestModel(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			r := s.explore(Decide, *limit)
			t.Log(r.String())
			switch {
			case r.broken != "":
			case r.states < *limit && !r.complete:
				t.Errorf("%d states, want %d", r.states, *limit)
				return
			default:
				return
			}
			t.Errorf("broken: %s", r.broken)
			for i, text := range r.way {
				t.Logf("%3d. %s", i+1, text)
			}
			for i, text := range r.after {
				if i < 40 {
					t.Logf("     then %s", text)
				}
			}
		})
	}
}
