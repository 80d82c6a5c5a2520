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
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// offer is what a GPU is offered as.
type offer struct {
	*fleet.GPU
	// whole says that it is offered whole.
	whole bool
	// partitions are one of each profile, and shares one of the whole GPU and of each profile that is shared.
	partitions, shares []part
}

// part is a device of a kind and profile.
type part struct {
	*fleet.Device
	// most is how many like it the GPU has room for: 1 for the whole GPU.
	most int
}

// memory is what it has, and largest what one of the claims that share it can have.
func (p part) memory() int64 { return p.Capacity(fleet.CapacityMemory) }

func (p part) largest() int64 {
	memory := p.Published.Capacity[fleet.CapacityMemory]
	largest := fleet.Largest(memory, memory.Value)
	return largest.Value()
}

// claims returns how many claims with so much memory share it.
func (p part) claims(memory int64) int {
	clients := p.Capacity(fleet.CapacityShares)
	if memory > 0 {
		clients = min(clients, p.memory()/memory)
	}
	return int(clients)
}

// offersOf returns what the GPUs of a cluster are offered as, by memory.
func offersOf(m *fleet.Model) ([]*offer, error) {
	var offers []*offer
	for g := range m.GPUs() {
		offers = append(offers, newOffer(g))
	}
	if len(offers) == 0 {
		return nil, errors.New("the cluster publishes no GPUs: is the driver installed, and is its name the one of --driver?")
	}
	slices.SortStableFunc(offers, func(a, b *offer) int {
		return cmp.Or(cmp.Compare(a.MemoryBytes, b.MemoryBytes), cmp.Compare(a.ProductName, b.ProductName))
	})
	return offers, nil
}

func newOffer(g *fleet.GPU) *offer {
	o := &offer{GPU: g}
	alike := map[[2]string][]*fleet.Device{}
	for _, d := range g.Devices {
		// What is tainted, such as a device that the policy has withdrawn, is for nobody new.
		if !d.Tainted() {
			alike[[2]string{d.Type, d.Profile}] = append(alike[[2]string{d.Type, d.Profile}], d)
		}
	}
	for _, d := range g.Devices {
		all := alike[[2]string{d.Type, d.Profile}]
		if len(all) == 0 || all[0] != d {
			continue
		}
		switch p := (part{d, g.Most(all)}); d.Type {
		case fleet.TypeGPU:
			o.whole = true
		case fleet.TypeMIG:
			o.partitions = append(o.partitions, p)
		case fleet.TypeMPS, fleet.TypeTimeSlice:
			o.shares = append(o.shares, p)
		}
	}
	return o
}

// share returns the smallest share by a mechanism with enough memory.
func (o *offer) share(t Traits, memory int64) *part {
	var best *part
	for _, s := range o.shares {
		suits := s.Type == t.device && (s.Profile != "") == t.partitions && s.Isolation == t.Attribute
		if suits && s.largest() >= memory && (best == nil || s.largest() < best.largest()) {
			best = &s
		}
	}
	return best
}

// parts are the partitions that are less than the GPU, and all where the GPU is not offered whole.
func (o *offer) parts() []part {
	if !o.whole {
		return o.partitions
	}
	most := 0
	for _, p := range o.partitions {
		most = max(most, p.slices())
	}
	return slices.DeleteFunc(slices.Clone(o.partitions), func(p part) bool { return p.slices() == most })
}

// smallest returns the partition with the least memory of those with enough, or nil. Of profiles with
// the same memory it takes the one with the fewest compute slices, but not one with much memory
// and few compute slices, such as 1g.20gb: those are for work that only needs room.
func smallest(partitions []part, memory int64) (best *part) {
	var most part
	for _, p := range partitions {
		if most.Device == nil || p.memory() > most.memory() {
			most = p
		}
	}
	for _, p := range partitions {
		less := best == nil || p.memory() < best.memory() || p.memory() == best.memory() && p.slices() < best.slices()
		if p.memory() >= memory && balanced(p, most) && less {
			best = &p
		}
	}
	return best
}

// balanced reports whether a partition has nearly the same part of the compute slices as of the
// memory.
func balanced(p, most part) bool {
	const nearly = 0.75
	if most.slices() == 0 || most.memory() == 0 {
		return true
	}
	compute := float64(p.slices()) / float64(most.slices())
	return compute >= nearly*float64(p.memory())/float64(most.memory())
}

// slices returns how many compute slices a profile has: N of "Ng.10gb", 0 if it has another form.
func (p part) slices() int {
	n := 0
	// What has another form has none.
	if _, err := fmt.Sscanf(p.Profile, "%dg.", &n); err != nil {
		return 0
	}
	return n
}

// shareRoom returns how many claims a GPU has room for as shares that are offered: of the whole
// GPU, or of as many partitions of a profile as fit (E5).
func shareRoom(g *fleet.GPU) int {
	room := 0
	for _, s := range newOffer(g).shares {
		room = max(room, s.most*s.claims(0))
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
		c.Count, c.DeviceClass = 1, c.class
		switch {
		case m.Class(c.class) == nil && !m.Hides(fleet.ResourceClasses):
			c.missing = "the cluster has no device class " + c.class
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
	var largest int64
	for _, o := range offers {
		if o.whole {
			largest = max(largest, o.MemoryBytes)
		}
	}
	if largest == 0 {
		c.missing = "no GPU is offered as a whole"
		return
	}
	c.Count = max(1, (memory+largest-1)/largest)
	each := (memory + c.Count - 1) / c.Count
	perNode := map[string]int64{}
	for _, o := range offers {
		if o.whole && o.MemoryBytes >= each {
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
	mig := false
	for _, o := range offers {
		mig = mig || len(o.partitions) > 0
		if p := smallest(o.parts(), memory); p != nil {
			c.add(o, p.most, p.Profile, p.memory())
		}
	}
	switch {
	case len(c.offers) > 0:
	case !mig:
		c.missing = "no GPU is offered with MIG partitions"
	default:
		c.missing = fmt.Sprintf("no partition has %s", printer.Bytes(memory))
	}
}

// takeShares takes shares of whole GPUs or of partitions. One that leaves no room for a second claim
// is none.
func (c *candidate) takeShares(offers []*offer, memory int64) {
	offered, fewest := false, 0
	for _, o := range offers {
		offered = offered || o.share(c.Traits, 0) != nil
		s := o.share(c.Traits, memory)
		if s == nil || s.claims(memory) < min(2, s.claims(0)) {
			continue
		}
		each := s.claims(memory)
		c.add(o, s.most*each, s.Profile, min(s.largest(), s.memory()/int64(each)))
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
	f := Fleet{Offered: map[Mechanism]bool{}, PreVolta: preVolta(offers), Models: len(products(offers)), Room: max(all[MPS].room, all[TimeSlice].room)}
	for m, c := range all {
		f.Offered[m] = c.missing == ""
	}
	f.MIG = slices.ContainsFunc(offers, func(o *offer) bool { return len(o.partitions) > 0 })
	f.Fills = memory*2 > offers[len(offers)-1].MemoryBytes
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
