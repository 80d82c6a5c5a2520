// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"cmp"
	"slices"
)

// Rule chooses a place.
type Rule struct {
	Name string
	// order is that of the partitions of a GPU.
	order func(*Board) []int
	// better compares the places that two GPUs offer first; the first GPU wins where they are
	// equal. Without it the first GPU that has a place is taken.
	better func(b *Board, x, y choice) bool
	// all says that every free place of a GPU is compared, not only the first.
	all bool
}

// choice is a place on a GPU that has these partitions.
type choice struct {
	gpu, partition int
	held           Held
}

// The rules that are compared.
var (
	// Published is what happens: the scheduler takes the first device of the slices that fits.
	Published = Rule{Name: "as published", order: published}
	// Alphabetical has the devices in the order of their names, in which NVIDIA's driver
	// publishes its own. The names are others, but partitions of one profile are in the same
	// order, by their first memory slice.
	Alphabetical = Rule{Name: "alphabetical", order: alphabetical}
	// Fullest starts with the GPU of which most is taken. No scheduler does so: the order of
	// slices would have to change with every claim.
	Fullest = Rule{Name: "fullest GPU first", order: published, better: fuller}
	// BestFit knows all free places of all GPUs, and takes the one that leaves most room.
	BestFit = Rule{Name: "best fit", order: published, better: leavesMore, all: true}
)

// Rules are all of them, in the order of the table.
var Rules = []Rule{Alphabetical, Published, Fullest, BestFit}

func published(b *Board) []int {
	order := make([]int, len(b.names))
	for p := range order {
		order[p] = p
	}
	return order
}

func alphabetical(b *Board) []int {
	order := published(b)
	slices.SortFunc(order, func(x, y int) int { return cmp.Compare(b.names[x], b.names[y]) })
	return order
}

func fuller(b *Board, x, y choice) bool { return b.at(x.held).used > b.at(y.held).used }

func leavesMore(b *Board, x, y choice) bool { return b.loss(x) < b.loss(y) }

// loss is how much room a choice costs.
func (b *Board) loss(c choice) int { return b.at(c.held).room - b.at(c.held.with(c.partition)).room }

// Chooser applies a rule to a board.
type Chooser struct {
	board *Board
	rule  Rule
	// places of each profile, in the rule's order.
	places [][]int
}

// NewChooser makes a Chooser.
func NewChooser(b *Board, r Rule) *Chooser {
	c := &Chooser{board: b, rule: r, places: make([][]int, len(b.Profiles))}
	for _, p := range r.order(b) {
		c.places[b.profile[p]] = append(c.places[b.profile[p]], p)
	}
	return c
}

// Choose returns the GPU and the partition for a claim, if there is a place. A profile is an index
// of the board's.
func (c *Chooser) Choose(gpus []Held, profile int) (gpu, partition int, ok bool) {
	var best choice
	for g, held := range gpus {
		fits := c.board.at(held).fits
		for _, p := range c.places[profile] {
			if !fits.has(p) {
				continue
			}
			found := choice{gpu: g, partition: p, held: held}
			if !ok || c.rule.better(c.board, found, best) {
				best, ok = found, true
			}
			if c.rule.better == nil {
				return best.gpu, best.partition, true
			}
			if !c.rule.all {
				break
			}
		}
	}
	return best.gpu, best.partition, ok
}
