// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
)

// candidate is a mechanism with a device of the fleet, or why there is none.
type candidate struct {
	mechanism Mechanism
	class     string
	// profiles are those to ask for, one of each model; for shares "" is that of whole GPUs.
	profiles []string
	// count is the number of devices for one replica.
	count int64
	// perGPU is how many replicas one GPU has room for, on the model where that is the least.
	perGPU int
	// room is how many replicas all GPUs have room for.
	room int
	// models are those that have it.
	models []*Model
	// ask is the memory to ask for, 0 for none.
	ask int64
	// smPercent is the part of the multiprocessors to ask for, 0 for none.
	smPercent int
	// policy says that the sharing policy has to offer it first.
	policy bool
	// missing says why the fleet does not have it, "" if it has.
	missing string
}

// mechanismInfo is where a mechanism is found in what is published.
var mechanismInfo = map[Mechanism]struct {
	class, deviceType string
	ofPartitions      bool
}{
	Whole:              {manifest.ClassGPU, fleet.TypeGPU, false},
	Partition:          {manifest.ClassMIG, fleet.TypeMIG, false},
	MPS:                {manifest.ClassMPS, fleet.TypeMPS, false},
	TimeSlice:          {manifest.ClassTimeSlice, fleet.TypeTimeSlice, false},
	SoftwareLimits:     {manifest.ClassTimeSlice, fleet.TypeTimeSlice, false},
	PartitionMPS:       {manifest.ClassMPS, fleet.TypeMPS, true},
	PartitionTimeSlice: {manifest.ClassTimeSlice, fleet.TypeTimeSlice, true},
}

// candidates returns one for each mechanism.
func candidates(s *Supply, memory int64) map[Mechanism]*candidate {
	all := map[Mechanism]*candidate{}
	for _, m := range Mechanisms {
		info := mechanismInfo[m]
		c := &candidate{mechanism: m, class: info.class, count: 1}
		switch {
		case s.lacksClass(info.class):
			c.missing = "the cluster has no device class " + info.class
		case m == Whole:
			c.whole(s, memory)
		case m == Partition:
			c.partition(s, memory)
		default:
			c.share(s, memory)
		}
		all[m] = c
	}
	return all
}

// whole takes as many GPUs as the memory needs, one if it is not known.
func (c *candidate) whole(s *Supply, memory int64) {
	var largest int64
	for _, m := range s.Models {
		if m.Whole {
			largest = max(largest, m.Memory)
		}
	}
	if largest == 0 {
		c.missing = "no GPU is offered as a whole"
		return
	}
	c.count = max(1, (memory+largest-1)/largest)
	each := (memory + c.count - 1) / c.count
	perNode := map[string]int{}
	for _, m := range s.Models {
		if !m.Whole || m.Memory < each {
			continue
		}
		c.models = append(c.models, m)
		for node, gpus := range m.PerNode {
			perNode[node] += gpus
		}
	}
	// The devices of a claim are those of one node.
	for _, gpus := range perNode {
		c.room += gpus / int(c.count)
	}
	switch {
	case c.count > resourceapi.AllocationResultsMaxSize:
		c.missing = fmt.Sprintf("a replica needs %d GPUs, and a claim has %d devices at most: divide the work among pods", c.count, resourceapi.AllocationResultsMaxSize)
	case c.room == 0 && s.Cluster:
		c.missing = fmt.Sprintf("a replica needs %d GPUs, and no node has as many: divide the work among pods on several nodes", c.count)
	}
	if len(c.models) < len(s.Models) {
		c.ask = each
	}
	c.perGPU = 1
}

// partition takes the smallest profile of each model.
func (c *candidate) partition(s *Supply, memory int64) {
	mig := false
	for _, m := range s.Models {
		mig = mig || len(m.Profiles) > 0
		p, found := SmallestProfile(m.parts(), memory)
		if !found {
			continue
		}
		c.add(m, p.Most)
		if !slices.Contains(c.profiles, p.Name) {
			c.profiles = append(c.profiles, p.Name)
		}
	}
	switch {
	case len(c.models) > 0:
	case !mig:
		c.missing = "no GPU is offered with MIG partitions"
	default:
		c.missing = fmt.Sprintf("no partition has %s", amount(memory))
	}
}

// parts are the profiles that are less than the GPU, and all where the GPU is not offered whole.
func (m *Model) parts() []Profile {
	if !m.Whole {
		return m.Profiles
	}
	most := 0
	for _, p := range m.Profiles {
		most = max(most, p.Slices())
	}
	return slices.DeleteFunc(slices.Clone(m.Profiles), func(p Profile) bool { return p.Slices() == most })
}

// share takes shares of whole GPUs or of partitions. One that leaves no room for a second claim
// is none.
func (c *candidate) share(s *Supply, memory int64) {
	info := mechanismInfo[c.mechanism]
	offered, fewest := false, 0
	for _, m := range s.Models {
		if share := m.share(info.deviceType, info.ofPartitions, 0); share == nil || !c.suits(share) {
			continue
		}
		offered = true
		share := m.share(info.deviceType, info.ofPartitions, memory)
		if share == nil || share.claims(memory) < min(2, share.Clients) {
			continue
		}
		c.add(m, share.room(memory))
		c.policy = c.policy || share.Policy
		if !slices.Contains(c.profiles, share.Profile) {
			c.profiles = append(c.profiles, share.Profile)
		}
		if each := share.claims(memory); fewest == 0 || each < fewest {
			fewest = each
		}
	}
	if len(c.models) == 0 {
		c.missing = c.noShare(s, offered, memory)
		return
	}
	c.ask = memory
	if info.deviceType == fleet.TypeMPS {
		c.smPercent = 100 / fewest
	}
}

// noShare says why there is none.
func (c *candidate) noShare(s *Supply, offered bool, memory int64) string {
	switch {
	case offered:
		return fmt.Sprintf("no GPU has room for two shares with %s", amount(memory))
	case c.mechanism == SoftwareLimits:
		return "no node has an interposer library (value softwareLimits.interposerLibrary of the chart)"
	case mechanismInfo[c.mechanism].ofPartitions:
		return "the sharing policy offers no such shares of partitions"
	case c.mechanism == MPS && allPreVolta(s):
		return "MPS has no limits before Volta, and is not offered there"
	}
	return "no GPU is offered with such shares"
}

// suits tells time-slice shares with software limits from those without.
func (c *candidate) suits(s *Share) bool {
	switch c.mechanism {
	case TimeSlice, PartitionTimeSlice:
		return !s.Limited
	case SoftwareLimits:
		return s.Limited
	case Whole, Partition, MPS, PartitionMPS:
	}
	return true
}

func (c *candidate) add(m *Model, perGPU int) {
	c.models = append(c.models, m)
	c.room += m.GPUs * perGPU
	if c.perGPU == 0 || perGPU < c.perGPU {
		c.perGPU = perGPU
	}
}

func allPreVolta(s *Supply) bool {
	return len(s.Models) > 0 && !slices.ContainsFunc(s.Models, func(m *Model) bool { return !m.PreVolta })
}

// fleetOf returns what the rules want to know of a fleet.
func fleetOf(s *Supply, all map[Mechanism]*candidate, memory int64) Fleet {
	f := Fleet{Offered: map[Mechanism]bool{}, PreVolta: allPreVolta(s), Models: len(products(s.Models))}
	for m, c := range all {
		f.Offered[m] = c.missing == ""
	}
	var largest int64
	for _, m := range s.Models {
		f.MIG = f.MIG || len(m.Profiles) > 0
		largest = max(largest, m.Memory)
	}
	f.Fills = memory*2 > largest
	f.Room = max(all[MPS].room, all[TimeSlice].room)
	return f
}

// amount writes memory as people do.
func amount(bytes int64) string {
	return fmt.Sprintf("%.1f GiB", float64(bytes)/gib)
}
