// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
)

// Mix is how often each profile is asked for, by its compute slices: "1g", "2g". Of several such
// profiles it is the first.
type Mix struct {
	Name   string
	Shares []Share
}

// Share is that of one profile.
type Share struct {
	Profile string
	Weight  float64
}

// Mixes are those that are simulated.
var Mixes = []Mix{
	{"mostly small", []Share{{"1g", 0.60}, {"2g", 0.20}, {"3g", 0.10}, {"4g", 0.05}, {"7g", 0.05}}},
	{"even", []Share{{"1g", 0.2}, {"2g", 0.2}, {"3g", 0.2}, {"4g", 0.2}, {"7g", 0.2}}},
}

// Large are the profiles that fragmentation hurts.
var Large = []string{"3g", "4g", "7g"}

// NodeOrder says which node the scheduler takes of those that have a place.
type NodeOrder int

const (
	// Spread takes the node that has the fewest claims, as the scheduler does by default with
	// pods that are alike.
	Spread NodeOrder = iota
	// Pack takes the node that has the most.
	Pack
)

// Churn describes arrivals and ends of claims. A claim for which there is no place is refused
// and does not come back. Both the times between arrivals and the lives of claims are
// exponentially distributed.
type Churn struct {
	Seed  uint64
	Nodes int
	GPUs  int // of each node
	Order NodeOrder
	Mix   Mix
	// Load is how much memory the claims that arrive would have on average if none were
	// refused, as a part of all there is.
	Load float64
	// Warmup is how many claims arrive before anything is counted, Claims how many then.
	Warmup, Claims int
}

// Outcome counts claims by profile, as the mix names them.
type Outcome struct {
	Asked, Accepted map[string]int
}

// Acceptance is the part of claims for these profiles that were accepted.
func (o Outcome) Acceptance(profiles ...string) float64 {
	asked, accepted := 0, 0
	for _, p := range profiles {
		asked, accepted = asked+o.Asked[p], accepted+o.Accepted[p]
	}
	return float64(accepted) / float64(max(1, asked))
}

// claim is one that has a place.
type claim struct {
	ends                 float64
	node, gpu, partition int
}

// ending are claims by their end.
type ending []claim

func (e ending) Len() int           { return len(e) }
func (e ending) Less(i, j int) bool { return e[i].ends < e[j].ends }
func (e ending) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *ending) Push(x any) {
	if c, ok := x.(claim); ok {
		*e = append(*e, c)
	}
}

func (e *ending) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// fleet is what runs.
type fleet struct {
	chooser *Chooser
	order   NodeOrder
	gpus    [][]Held // of each node
	claims  []int    // of each node
	ending  ending
}

// Run simulates. The same claims arrive, and live equally long, whatever the rule is.
func (c Churn) Run(b *Board, r Rule) (Outcome, error) {
	profiles, err := c.Mix.profiles(b)
	if err != nil {
		return Outcome{}, err
	}
	f := &fleet{chooser: NewChooser(b, r), order: c.Order, claims: make([]int, c.Nodes)}
	for range c.Nodes {
		f.gpus = append(f.gpus, make([]Held, c.GPUs))
	}
	mean := 0.0 // memory slices of a claim
	for i, s := range c.Mix.Shares {
		mean += s.Weight * float64(b.size[profiles[i]])
	}
	// Claims live for one unit of time on average.
	rate := c.Load * float64(c.Nodes*c.GPUs*b.memorySlices) / mean
	random := rand.New(rand.NewPCG(c.Seed, 0)) // #nosec G404 -- a simulation has to be repeatable
	outcome := Outcome{Asked: map[string]int{}, Accepted: map[string]int{}}
	now := 0.0
	for n := range c.Warmup + c.Claims {
		now += random.ExpFloat64() / rate
		share, ends := c.Mix.pick(random.Float64()), now+random.ExpFloat64()
		f.end(now)
		accepted := f.place(profiles[share], ends)
		if n < c.Warmup {
			continue
		}
		outcome.Asked[c.Mix.Shares[share].Profile]++
		if accepted {
			outcome.Accepted[c.Mix.Shares[share].Profile]++
		}
	}
	return outcome, nil
}

// end removes the claims that have ended.
func (f *fleet) end(now float64) {
	for len(f.ending) > 0 && f.ending[0].ends <= now {
		c, _ := heap.Pop(&f.ending).(claim)
		f.gpus[c.node][c.gpu] = f.gpus[c.node][c.gpu].minus(c.partition)
		f.claims[c.node]--
	}
}

// place gives a claim a place if there is one.
func (f *fleet) place(profile int, ends float64) bool {
	best := claim{node: -1}
	for n, gpus := range f.gpus {
		if best.node >= 0 && !f.prefers(n, best.node) {
			continue
		}
		if g, p, ok := f.chooser.Choose(gpus, profile); ok {
			best = claim{ends: ends, node: n, gpu: g, partition: p}
		}
	}
	if best.node < 0 {
		return false
	}
	f.gpus[best.node][best.gpu] = f.gpus[best.node][best.gpu].with(best.partition)
	f.claims[best.node]++
	heap.Push(&f.ending, best)
	return true
}

func (f *fleet) prefers(node, other int) bool {
	if f.order == Pack {
		return f.claims[node] > f.claims[other]
	}
	return f.claims[node] < f.claims[other]
}

// profiles returns the index of each of the mix's.
func (m Mix) profiles(b *Board) ([]int, error) {
	var indexes []int
	for _, s := range m.Shares {
		i := slices.IndexFunc(b.Profiles, func(name string) bool { return len(name) > len(s.Profile) && name[:len(s.Profile)+1] == s.Profile+"." })
		if i < 0 {
			return nil, fmt.Errorf("no profile of %v is a %s", b.Profiles, s.Profile)
		}
		indexes = append(indexes, i)
	}
	return indexes, nil
}

// pick returns the share that a number from 0 to 1 falls into.
func (m Mix) pick(at float64) int {
	for i, s := range m.Shares {
		if at -= s.Weight; at < 0 {
			return i
		}
	}
	return len(m.Shares) - 1
}
