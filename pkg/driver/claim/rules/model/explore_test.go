// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"hash/maphash"
	"strings"
	"time"
)

var seed = maphash.MakeSeed()

func hash(w *world) uint64 { return maphash.Comparable(seed, *w) }

// Result is what an exploration has found.
type Result struct {
	States, Transitions, Settled, Frozen int
	// Indistinct is how many states have an instance that nothing tells apart from a claim's.
	Indistinct int
	Depth      int
	Time       time.Duration
	// Broken is the promise that is broken, with the shortest way there.
	Broken string
	Trace  []string
	// After is what the loops did from there, without another fault.
	After []string
	// Complete means that every state was visited.
	Complete bool
}

// PerSecond is how many states were explored in a second, with everything that is asserted in each.
func (r Result) PerSecond() float64 { return float64(r.States) / r.Time.Seconds() }

func (r Result) String() string {
	return fmt.Sprintf("%9d states %10d transitions %8d settled  depth %2d  %6.1f s %8.0f states/s  complete=%v  indistinct %d",
		r.States, r.Transitions, r.Settled+r.Frozen, r.Depth, r.Time.Seconds(), r.PerSecond(), r.Complete, r.Indistinct)
}

// node is a state in the order of discovery: its parent, and the number of the transition from there.
type node struct {
	parent int32
	step   int16
}

// Explore visits all states of a scenario, breadth first, up to a limit.
func Explore(s *Scenario, decide Decider, limit int) Result {
	began := time.Now()
	m := &machine{Scenario: s, decide: decide}
	start := s.start()
	seen := map[uint64]struct{}{hash(&start): {}}
	healed, frozen := map[uint64]bool{}, map[uint64]bool{}
	nodes := []node{{parent: -1}}
	frontier, ids := []world{start}, []int32{0}
	r := Result{States: 1, Complete: true}
	fail := func(id int32, v violation, last string) Result {
		r.Broken, r.Time = string(v), time.Since(began)
		r.Trace = m.trace(start, nodes, id)
		if last != "" {
			r.Trace = append(r.Trace, last)
		}
		return r
	}
	failAtRest := func(w world, id int32, v violation) Result {
		r := fail(id, v, "")
		m.note = func(l Label) { r.After = append(r.After, l.String()) }
		m.again = func() { r.After = nil }
		m.rest(w, nil, nil, &Result{})
		return r
	}
	for len(frontier) > 0 {
		var next []world
		var nextIDs []int32
		for i := range frontier {
			w, id := &frontier[i], ids[i]
			if v := m.rest(*w, healed, frozen, &r); v != "" {
				return failAtRest(*w, id, v)
			}
			var broken violation
			var last string
			step := int16(-1)
			m.successors(w, func(l Label, n *world, v violation) {
				step++
				r.Transitions++
				if broken != "" {
					return
				}
				if v != "" {
					broken, last = v, l.String()
					return
				}
				n.normal()
				h := hash(n)
				if _, known := seen[h]; known {
					return
				}
				if r.States >= limit {
					r.Complete = false
					return
				}
				seen[h] = struct{}{}
				r.States++
				nodes = append(nodes, node{id, step})
				next, nextIDs = append(next, *n), append(nextIDs, int32(len(nodes)-1))
			})
			if broken != "" {
				return fail(id, broken, last)
			}
		}
		frontier, ids = next, nextIDs
		r.Depth++
	}
	r.Time = time.Since(began)
	return r
}

// rest asserts that everything comes to rest from a state: once all faults are over, and while those
// that are there stay.
func (m *machine) rest(w world, healed, frozen map[uint64]bool, r *Result) violation {
	for g := range w.GPU {
		for i := range w.GPU[g].Instances {
			if w.GPU[g].Instances[i].Indistinct {
				r.Indistinct++
			}
		}
	}
	still := w
	m.freeze(&still)
	if end, v, known := m.quiet(still, frozen); v != "" {
		return "while faults stay: " + v
	} else if !known {
		r.Frozen++
		if v := m.atRest(&end, true); v != "" {
			return "while faults stay: " + v
		}
	}
	m.heal(&w)
	if m.again != nil {
		m.again()
	}
	end, v, known := m.quiet(w, healed)
	if v != "" {
		return "when all faults are over: " + v
	}
	if known {
		return ""
	}
	r.Settled++
	if v := m.atRest(&end, false); v != "" {
		return "when all faults are over: " + v
	}
	return ""
}

// trace says how a state was reached.
func (m *machine) trace(start world, nodes []node, id int32) []string {
	var steps []int16
	for ; nodes[id].parent >= 0; id = nodes[id].parent {
		steps = append(steps, nodes[id].step)
	}
	w := start
	var lines []string
	for i := len(steps) - 1; i >= 0; i-- {
		at := int16(-1)
		var chosen world
		var label Label
		m.successors(&w, func(l Label, n *world, _ violation) {
			if at++; at == steps[i] {
				chosen, label = *n, l
			}
		})
		chosen.normal()
		w = chosen
		lines = append(lines, label.String())
	}
	return lines
}

// Print shows a counterexample.
func (r Result) Print() string {
	var b strings.Builder
	for i, line := range r.Trace {
		fmt.Fprintf(&b, "  %2d. %s\n", i+1, line)
	}
	if len(r.After) > 0 {
		fmt.Fprintf(&b, "      no further fault:\n")
	}
	for i, line := range r.After {
		fmt.Fprintf(&b, "  %2d. %s\n", len(r.Trace)+i+1, line)
	}
	fmt.Fprintf(&b, "   => %s\n", r.Broken)
	return b.String()
}
