// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
)

const driver = "gpu.nvidia.com"

// Board is what GPUs of one model can be divided into.
type Board struct {
	// Profiles are the names of the MIG profiles, from small to large.
	Profiles []string
	// names are those of the partitions of the first GPU, in published order.
	names []string
	// profile of each partition, an index of Profiles.
	profile []int
	// uses is what each partition takes of each counter, and total what there is.
	uses  [][]int64
	total []int64
	// size is how many memory slices a partition of each profile has, and memorySlices how
	// many the GPU has.
	size         []int
	memorySlices int
	// known are the states of GPUs that were looked at before.
	known map[Held]*state
}

// Held are the partitions that claims have of a GPU: a bit for each, in published order.
type Held uint64

func (h Held) has(partition int) bool   { return h&(1<<partition) != 0 }
func (h Held) with(partition int) Held  { return h | 1<<partition }
func (h Held) minus(partition int) Held { return h &^ (1 << partition) }

// state is what is left of a GPU.
type state struct {
	// fits are the partitions for which there is room.
	fits Held
	// used is how many memory slices are taken.
	used int
	// room is a measure of what still fits, see Board.room.
	room int
}

// LoadBoard returns what the driver publishes of a model of GPU.
func LoadBoard(model string) (*Board, error) {
	facts, err := boards.Load(model)
	if err != nil {
		return nil, err
	}
	published, err := slicesOf(model, 1)
	if err != nil {
		return nil, err
	}
	mig := facts.GPUs[0].MIG
	b := &Board{memorySlices: mig.MemorySlices, known: map[Held]*state{}}
	counters := map[string]int{}
	for i := range published {
		for _, set := range published[i].Spec.SharedCounters {
			for name, c := range set.Counters {
				counters[name] = len(b.total)
				b.total = append(b.total, c.Value.Value())
			}
		}
	}
	for i := range published {
		for j := range published[i].Spec.Devices {
			d := &published[i].Spec.Devices[j]
			if ptr.Deref(d.Attributes["type"].StringValue, "") != string(device.Partition) {
				continue
			}
			b.add(d, counters)
		}
	}
	if len(b.names) == 0 || len(b.names) > bits.UintSize {
		return nil, fmt.Errorf("the GPU model %s has %d partitions: this simulates 1 to %d", model, len(b.names), bits.UintSize)
	}
	for _, name := range b.Profiles {
		i := slices.IndexFunc(mig.Profiles, func(p gpu.Profile) bool { return p.Name == name })
		b.size = append(b.size, mig.Profiles[i].Placements[0].Size)
	}
	return b, nil
}

// add adds a partition. The driver publishes them by profile, from small to large.
func (b *Board) add(d *resourceapi.Device, counters map[string]int) {
	uses := make([]int64, len(b.total))
	for _, set := range d.ConsumesCounters {
		for name, c := range set.Counters {
			uses[counters[name]] = c.Value.Value()
		}
	}
	name := *d.Attributes["profile"].StringValue
	profile := slices.Index(b.Profiles, name)
	if profile < 0 {
		profile = len(b.Profiles)
		b.Profiles = append(b.Profiles, name)
	}
	b.names, b.profile, b.uses = append(b.names, d.Name), append(b.profile, profile), append(b.uses, uses)
}

// slicesOf are the ResourceSlices of a node with so many GPUs. On models with a MIG mode it is on.
func slicesOf(model string, count int) ([]resourceapi.ResourceSlice, error) {
	machine := template.Machine{Model: model, Count: count, MIG: true}
	made, problems, err := machine.Slices(template.Options{Driver: driver, Node: "node"})
	if err != nil {
		return nil, fmt.Errorf("make the slices of %d GPUs %s: %w", count, model, err)
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("make the slices of %d GPUs %s: %s", count, model, strings.Join(problems, "; "))
	}
	return made, nil
}

// at looks at a GPU.
func (b *Board) at(held Held) *state {
	if s, known := b.known[held]; known {
		return s
	}
	left, s := slices.Clone(b.total), &state{}
	for p := range b.names {
		if held.has(p) {
			take(left, b.uses[p], 1)
			s.used += b.size[b.profile[p]]
		}
	}
	for p := range b.names {
		if !held.has(p) && fit(left, b.uses[p]) {
			s.fits = s.fits.with(p)
		}
	}
	s.room = b.room(left, s.fits)
	b.known[held] = s
	return s
}

// room adds up, over all profiles, the memory slices that partitions of this profile could have
// together if there were no others.
func (b *Board) room(left []int64, fits Held) int {
	room := 0
	for profile := range b.Profiles {
		var places []int
		for p := range b.names {
			if fits.has(p) && b.profile[p] == profile {
				places = append(places, p)
			}
		}
		room += b.size[profile] * b.most(left, places)
	}
	return room
}

// most returns how many of the partitions fit together.
func (b *Board) most(left []int64, places []int) int {
	best := 0
	for i, p := range places {
		if len(places)-i <= best {
			break
		}
		if fit(left, b.uses[p]) {
			take(left, b.uses[p], 1)
			best = max(best, 1+b.most(left, places[i+1:]))
			take(left, b.uses[p], -1)
		}
	}
	return best
}

func fit(left, uses []int64) bool {
	for i, use := range uses {
		if left[i] < use {
			return false
		}
	}
	return true
}

func take(left, uses []int64, times int64) {
	for i, use := range uses {
		left[i] -= times * use
	}
}
