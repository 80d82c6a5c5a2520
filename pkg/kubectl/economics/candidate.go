// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// offer is what a GPU is offered as, whatever claims have of it now.
type offer struct {
	*fleet.GPU
	fleet.Room
}

// offersOf returns what the GPUs of a cluster are offered as, by memory, except those of nodes whose slices are not all there.
func offersOf(m *fleet.Model) ([]*offer, error) {
	var offers []*offer
	incomplete := ""
	for g := range m.GPUs() {
		if g.Node.Incomplete {
			incomplete = g.Node.Name
			continue
		}
		offers = append(offers, &offer{g, fleet.Offered(g)})
	}
	switch {
	case len(offers) > 0:
	case incomplete != "":
		return nil, fmt.Errorf("not all ResourceSlices of node %s are there, so it is not known what its GPUs are offered as: try again", incomplete)
	default:
		return nil, errors.New("the cluster publishes no GPUs: is the driver installed, and is its name the one of --driver?")
	}
	slices.SortStableFunc(offers, func(a, b *offer) int {
		return cmp.Or(cmp.Compare(a.MemoryBytes, b.MemoryBytes), cmp.Compare(a.ProductName, b.ProductName))
	})
	return offers, nil
}

// share returns the share with the least memory of those by a mechanism that have enough, or nil.
func (o *offer) share(t Traits, memory int64) (best *fleet.ShareRoom) {
	for _, s := range o.Shares {
		suits := s.Type == t.device && (s.Profile != "") == t.partitions && s.Device.Isolation == t.Memory
		if suits && s.MemoryBytes >= memory && (best == nil || s.MemoryBytes < best.MemoryBytes) {
			best = &s
		}
	}
	return best
}

// most returns how many devices the GPU has room for that are shared as this one: 1 of the whole GPU.
func (o *offer) most(s fleet.ShareRoom) int {
	var alike []*fleet.Device
	for _, other := range o.Shares {
		if other.Type == s.Type && other.Profile == s.Profile {
			alike = append(alike, other.Device)
		}
	}
	return o.Most(alike)
}

// claims returns how many claims with so much memory can have a share.
func claims(s *fleet.ShareRoom, memory int64) int {
	if memory == 0 {
		return s.Shares
	}
	return min(s.Shares, int(s.Device.Capacity(fleet.CapacityMemory)/memory))
}

// partition returns the profile with the least memory of those with enough, or nil. Of profiles with the same memory it takes the one with
// the fewest compute slices, but not one with much memory and few compute slices, such as 1g.20gb: those are for work that only needs room.
// One that is all of a GPU is for GPUs that are not offered whole.
func (o *offer) partition(memory int64) (best *fleet.PartitionRoom) {
	var full fleet.PartitionRoom
	for _, p := range o.Partitions {
		if p.MemoryBytes > full.MemoryBytes {
			full = p
		}
	}
	for _, p := range o.Partitions {
		all := o.Whole && 4*p.MemoryBytes > 3*o.MemoryBytes
		// Its part of the compute slices is at least three quarters of that of the memory.
		balanced := 4*compute(p)*full.MemoryBytes >= 3*compute(full)*p.MemoryBytes
		less := best == nil || p.MemoryBytes < best.MemoryBytes || p.MemoryBytes == best.MemoryBytes && compute(p) < compute(*best)
		if p.MemoryBytes >= memory && balanced && less && !all {
			best = &p
		}
	}
	return best
}

// compute returns how many compute slices a profile has: N of "Ng.10gb", 0 if it has another form.
func compute(p fleet.PartitionRoom) (n int64) {
	// What has another form has none.
	if _, err := fmt.Sscanf(p.Profile, "%dg.", &n); err != nil {
		return 0
	}
	return n
}

// shareRoom returns how many claims a GPU has room for as shares that are offered: of the whole
// GPU, or of as many partitions of a profile as fit (E5).
func shareRoom(g *fleet.GPU) (room int) {
	o := offer{g, fleet.Offered(g)}
	for _, s := range o.Shares {
		room = max(room, o.most(s)*s.Shares)
	}
	return room
}

// preVolta goes by the architecture's name.
func preVolta(offers []*offer) bool {
	return !slices.ContainsFunc(offers, func(o *offer) bool { return !slices.Contains([]string{"Kepler", "Maxwell", "Pascal"}, o.Architecture) })
}

// candidate is a mechanism with devices of the fleet, or why there are none.
type candidate struct {
	mechanism Mechanism
	Traits
	// Request is for one replica. Its profiles are one of each model.
	Request
	// perGPU is how many replicas one GPU has room for, on the model where that is the least.
	perGPU int
	// room is how many replicas all GPUs have room for.
	room int
	// offers are the GPUs that have it. If a claim asks for more memory than most, fewer claims fit on one of them.
	offers []*offer
	most   int64
	// missing says why the fleet does not have it, "" if it has.
	missing string
}

// candidates returns one for each mechanism.
func candidates(m *fleet.Model, offers []*offer, memory int64) map[Mechanism]*candidate {
	all := map[Mechanism]*candidate{}
	for _, mechanism := range Mechanisms {
		c := &candidate{mechanism: mechanism, Traits: Guarantees[mechanism], most: offers[len(offers)-1].MemoryBytes}
		c.Count, c.DeviceClass = 1, manifest.ClassOf(c.device)
		switch {
		case m.Class(c.DeviceClass) == nil && !m.Hides(fleet.ResourceClasses):
			c.missing = "the cluster has no device class " + c.DeviceClass
		case mechanism == Whole:
			c.takeWhole(offers, memory)
		case mechanism == Partition:
			c.takePartitions(offers, memory)
		default:
			c.takeShares(offers, memory)
		}
		c.GPUs = products(c.offers)
		all[mechanism] = c
	}
	return all
}

// takeWhole takes as many GPUs as the memory needs, one if it is not known.
func (c *candidate) takeWhole(offers []*offer, memory int64) {
	whole := slices.DeleteFunc(slices.Clone(offers), func(o *offer) bool { return !o.Whole })
	if len(whole) == 0 {
		c.missing = "no GPU is offered as a whole"
		return
	}
	largest := whole[len(whole)-1].MemoryBytes
	c.Count = max(1, (memory+largest-1)/largest)
	each := (memory + c.Count - 1) / c.Count
	perNode := map[string]int64{}
	for _, o := range whole {
		if o.MemoryBytes >= each {
			c.add(o, 1, "", o.MemoryBytes)
			perNode[o.Node.Name]++
		}
	}
	// The devices of a claim are those of one node.
	c.room = 0
	for _, gpus := range perNode {
		c.room += int(gpus / c.Count)
	}
	switch {
	case c.Count > resourceapi.AllocationResultsMaxSize:
		c.missing = fmt.Sprintf("a replica needs %d GPUs, and a claim has %d devices at most: divide the work among pods", c.Count, resourceapi.AllocationResultsMaxSize)
	case c.room == 0:
		c.missing = fmt.Sprintf("a replica needs %d GPUs, and no node has as many: divide the work among pods on several nodes", c.Count)
	}
	if len(c.offers) < len(offers) {
		c.ask(each)
	}
}

// takePartitions takes the smallest profile of each model.
func (c *candidate) takePartitions(offers []*offer, memory int64) {
	for _, o := range offers {
		if p := o.partition(memory); p != nil {
			c.add(o, p.Count, p.Profile, p.MemoryBytes)
		}
	}
	switch {
	case len(c.offers) > 0:
	case !partitioned(offers):
		c.missing = "no GPU is offered with MIG partitions"
	default:
		c.missing = fmt.Sprintf("no partition has %s", printer.Bytes(memory))
	}
}

// partitioned reports whether some GPU is offered with MIG partitions.
func partitioned(offers []*offer) bool {
	return slices.ContainsFunc(offers, func(o *offer) bool { return len(o.Partitions) > 0 })
}

// takeShares takes shares of whole GPUs or of partitions. One that leaves no room for a second claim
// is none.
func (c *candidate) takeShares(offers []*offer, memory int64) {
	offered, fewest := false, 0
	for _, o := range offers {
		offered = offered || o.share(c.Traits, 0) != nil
		s := o.share(c.Traits, memory)
		if s == nil || claims(s, memory) < min(2, s.Shares) {
			continue
		}
		each := claims(s, memory)
		c.add(o, o.most(*s)*each, s.Profile, min(s.MemoryBytes, s.Device.Capacity(fleet.CapacityMemory)/int64(each)))
		if fewest == 0 || each < fewest {
			fewest = each
		}
	}
	if len(c.offers) == 0 {
		c.missing = c.noShare(offers, offered, memory)
		return
	}
	c.ask(memory)
	if c.device == fleet.TypeMPS {
		c.SMPercent = 100 / fewest
	}
}

// noShare says why there is none.
func (c *candidate) noShare(offers []*offer, offered bool, memory int64) string {
	switch {
	case offered:
		return fmt.Sprintf("no GPU has room for two shares with %s", printer.Bytes(memory))
	case c.mechanism == SoftwareLimits:
		return "no node has an interposer library (value softwareLimits.interposerLibrary of the chart)"
	case c.partitions:
		return "the sharing policy offers no such shares of partitions"
	case c.mechanism == MPS && preVolta(offers):
		return "MPS has no limits before Volta, and is not offered there"
	}
	return "no GPU is offered with such shares"
}

// add adds a GPU that has room for perGPU replicas with a profile, or "". If each asks for more memory than most, fewer fit.
func (c *candidate) add(o *offer, perGPU int, profile string, most int64) {
	c.offers = append(c.offers, o)
	c.room += perGPU
	if c.perGPU == 0 || perGPU < c.perGPU {
		c.perGPU = perGPU
	}
	if profile != "" && !slices.Contains(c.Profiles, profile) {
		c.Profiles = append(c.Profiles, profile)
	}
	c.most = min(c.most, most)
}

// ask sets the memory to ask for, rounded up to whole GiB, or to MiB where fewer claims would fit then.
func (c *candidate) ask(memory int64) {
	up := func(unit int64) int64 { return (memory + unit - 1) / unit * unit }
	if c.MemoryBytes = up(gib); c.MemoryBytes > c.most {
		c.MemoryBytes = up(mib)
	}
	if c.MemoryBytes > 0 {
		c.memory = resource.NewQuantity(c.MemoryBytes, resource.BinarySI).String()
	}
}

// fleetOf returns what the rules want to know of a fleet.
func fleetOf(offers []*offer, all map[Mechanism]*candidate, memory int64) Fleet {
	f := Fleet{
		Offered: map[Mechanism]bool{}, Fills: memory*2 > offers[len(offers)-1].MemoryBytes, MIG: partitioned(offers),
		PreVolta: preVolta(offers), Models: len(products(offers)), Room: max(all[MPS].room, all[TimeSlice].room),
	}
	for m, c := range all {
		f.Offered[m] = c.missing == ""
	}
	return f
}

// products returns the names of models, each once.
func products(offers []*offer) []string {
	var names []string
	for _, o := range offers {
		if !slices.Contains(names, o.ProductName) {
			names = append(names, o.ProductName)
		}
	}
	return names
}
