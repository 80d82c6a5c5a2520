// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// maxDevices is how many devices a GPU has at most that do not depend on the
// status, beside the observer.
const maxDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures - reservedForStatic - 1

// catalog lists everything that one GPU can be published as. The policy and the
// room in a slice choose from it.
type catalog struct {
	board
	terms Terms
	offer policy.Effective
	// candidates are in published order.
	candidates []candidate
	problems   []error
}

type candidate struct {
	Device
	// offered says that the policy offers the device. Others are published only
	// where they are kept.
	offered bool
	group   group
}

// group identifies devices that are left out together where a slice does not hold
// all.
type group struct {
	// The group with the lowest class, and then rank, is left out last.
	class, rank int
	// what names the devices, with a verb, in the problem.
	what string
}

// Classes of groups. The whole GPU and partitions come first because any claim
// can use them, shares of the whole GPU because they are two devices only.
const (
	classWhole = iota
	classPartitions
	classWholeShares
	classPartitionShares
)

func (g group) compare(other group) int {
	return cmp.Or(cmp.Compare(g.class, other.class), cmp.Compare(g.rank, other.rank))
}

// place is a partition that the GPU can hold.
type place struct {
	Device
	// static says that a partition which somebody else made here is published.
	static bool
}

func newBoard(node *gpu.Node, g *gpu.GPU, terms Terms) (board, []error) {
	c := catalog{
		board: board{name: GPUName(g.PCIAddress), node: node, gpu: g, withdrawn: map[string]bool{}, overflow: map[string]bool{}, extended: terms.ExtendedResources},
		terms: terms,
		offer: terms.Policy.For(g),
	}
	whole, partitions := possibleKinds(g)
	if err := errCoherent[g.CoherentMemory]; err != nil && c.offer.Partition != nil {
		c.problems = append(c.problems, err)
	}
	var shapes []PartitionShape
	if partitions {
		shapes = c.layOutPartitions()
	}
	if len(shapes) == 0 {
		c.counters = newUndividedLayout(c.name, c.gpu)
	}
	devices, profiles := c.partitionDevices(shapes), byProfile(shapes)
	for _, d := range devices {
		name := d.Partition.Profile.Name
		c.add(d, c.offer.Partition.Offers(name), group{classPartitions, rankOf(d, profiles), "profile " + name + " is"})
	}
	if whole {
		c.add(Device{Name: c.name, Kind: Whole}, c.offer.Whole, group{classWhole, 0, "the whole GPU is"})
	}
	c.addPartitionShares(devices, profiles)
	if whole {
		for n, option := range c.shareOptions(nil) {
			c.addShare(Device{Name: c.name}, option, group{classWholeShares, n, option.title + " shares are"})
		}
	}
	c.choose()
	c.checkSomethingPublished()
	return c.with(Status{}), c.problems
}

// errCoherent says why a GPU that is coherent with the CPU has no partitions.
var errCoherent = map[gpu.CoherentMemory]error{
	gpu.CoherentDriver: errors.New("no partitions are published: the GPU is coherent with the CPU and the driver manages its memory " +
		"(CoherentGPUMemoryMode=driver), which NVIDIA does not support together with MIG"),
	gpu.CoherentUnknown: errors.New("no partitions are published: the GPU is coherent with the CPU, and whether the driver manages its memory, " +
		"which NVIDIA does not support together with MIG, cannot be read in /proc/driver/nvidia/params"),
}

// possibleKinds reports which kinds of devices a GPU can be.
func possibleKinds(g *gpu.GPU) (whole, partitions bool) {
	switch {
	case g.MIG == nil || errCoherent[g.CoherentMemory] != nil:
		return true, false
	case g.MIG.Dynamic:
		return true, true
	default:
		// The mode needs a GPU reset to change, so it decides.
		return !g.MIG.Enabled, g.MIG.Enabled
	}
}

// oneIf returns 1 for true and 0 for false.
func oneIf(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// layOutPartitions determines the counters for all partitions that the GPU can hold
// and returns these partitions, the most important ones first. It ignores the
// policy: a partition that the policy does not offer may exist all the same, and
// another policy must not change what an allocated device draws.
func (c *catalog) layOutPartitions() []PartitionShape {
	shapes, problems := usableShapes(c.gpu.MIG)
	if len(shapes) == 0 {
		problems = append(problems, errors.New("the driver reports no MIG profiles that could be published"))
	} else {
		counters, err := newCounterLayout(c.name, c.gpu, shapes)
		if err != nil {
			problems = append(problems, fmt.Errorf("no partitions are published: %w", err))
			shapes = nil
		}
		c.counters = counters
	}
	if c.offer.Partition != nil {
		c.problems = append(c.problems, problems...)
	}
	return shapes
}

func (c *catalog) add(d Device, offered bool, g group) {
	d.GPU = c.gpu
	c.candidates = append(c.candidates, candidate{Device: d, offered: offered, group: g})
}

// addShare adds the share of a device that an option describes.
func (c *catalog) addShare(base Device, o shareOption, g group) {
	o.share.Base = base.Name
	base.Name, base.Kind, base.Share = shareName(base.Name, o.kind), o.kind, &o.share
	c.add(base, o.offered, g)
}

// addPartitionShares takes the profiles by importance.
func (c *catalog) addPartitionShares(devices []Device, profiles []PartitionShape) {
	options := make([][]shareOption, len(profiles))
	for n := range profiles {
		options[n] = c.shareOptions(&profiles[n].Profile)
	}
	for _, d := range devices {
		rank := rankOf(d, profiles)
		for n, option := range options[rank] {
			c.addShare(d, option, group{classPartitionShares, 2*rank + n, option.title + " shares of profile " + d.Partition.Profile.Name + " are"})
		}
	}
}

// byProfile returns the first of the shapes of each profile, which follow each other.
func byProfile(shapes []PartitionShape) []PartitionShape {
	return slices.CompactFunc(slices.Clone(shapes), func(a, b PartitionShape) bool { return a.Profile.ID == b.Profile.ID })
}

// rankOf is the place of a partition's profile among all.
func rankOf(d Device, profiles []PartitionShape) int {
	return slices.IndexFunc(profiles, func(s PartitionShape) bool { return s.Profile.ID == d.Partition.Profile.ID })
}

// partitionDevices returns the partitions as devices, in published order.
func (c *catalog) partitionDevices(shapes []PartitionShape) (devices []Device) {
	if len(shapes) == 0 {
		return nil
	}
	texts := profileTexts(c.name, c.gpu.MIG)
	for _, s := range orderShapes(shapes) {
		devices = append(devices, Device{
			Name:      partitionName(c.name, texts[s.Profile.ID], s.Placement.Start),
			Kind:      Partition,
			Partition: &s,
		})
	}
	return devices
}

// choose decides which candidates are published: those that the policy offers, group
// by group as long as the GPU's slice has room, and all others that claims may have.
// The latter take no room from the former, or a new policy would have to wait for
// claims to end.
func (c *catalog) choose() {
	wanted := map[group]int{}
	for _, d := range c.candidates {
		if d.offered {
			wanted[d.group]++
		}
	}
	room := maxDevices
	for _, g := range slices.SortedFunc(maps.Keys(wanted), group.compare) {
		if wanted[g] > room {
			c.problems = append(c.problems, noRoom(g.what))
			delete(wanted, g)
		}
		room -= wanted[g]
	}
	offered := func(d candidate) bool { return d.offered && wanted[d.group] > 0 }
	byGroup := func(a, b candidate) int { return a.group.compare(b.group) }
	for _, d := range slices.SortedStableFunc(slices.Values(c.candidates), byGroup) {
		if c.terms.Keep[d.Name] && !offered(d) {
			c.withdrawn[d.Name] = true
			if room--; room < 0 {
				c.overflow[d.Name] = true
			}
		}
	}
	for _, d := range c.candidates {
		c.record(d, offered(d))
	}
}

func noRoom(what string) error {
	return fmt.Errorf("%s left out: a ResourceSlice with counters holds at most %d devices, %d of them for partitions that somebody else made and one for the observer",
		what, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures, reservedForStatic)
}

// record adds the outcome for a candidate to the board.
func (c *catalog) record(d candidate, offered bool) {
	if offered || c.withdrawn[d.Name] {
		c.devices = append(c.devices, d.Device)
	}
	if d.Kind != Partition {
		return
	}
	// A static partition exists whatever the policy says. It is offered where a
	// partition of this driver would be, and where that would be a variant.
	variant := policy.IsVariant(d.Partition.Profile.Name) && c.offer.Partition.OffersExisting(d.Partition.Profile.Name)
	static := offered || variant
	kept := c.terms.Keep[staticName(d.Name)]
	if kept && !static {
		c.withdrawn[staticName(d.Name)] = true
	}
	c.places = append(c.places, place{Device: d.Device, static: static || kept})
}

// checkSomethingPublished reports a GPU that cannot be anything that the policy
// offers, unless another problem explains it. A policy that offers nothing is no
// problem.
func (c *catalog) checkSomethingPublished() {
	offers := c.offer.Whole || c.offer.Partition != nil || c.offer.MPS != nil || c.offer.TimeSlice != nil
	published := slices.ContainsFunc(c.devices, func(d Device) bool { return !c.withdrawn[d.Name] })
	if offers && !published && len(c.problems) == 0 {
		c.problems = append(c.problems, fmt.Errorf("nothing is published: %s, and it can be nothing of what the policy's %s offers (%s)",
			describeMIG(c.gpu.MIG), c.offer.From(), c.offer.Offer))
	}
}

func describeMIG(mig *gpu.MIG) string {
	switch {
	case mig == nil:
		return "the GPU has no MIG"
	case mig.Dynamic:
		return "MIG follows the claims"
	case mig.Enabled:
		return "MIG is on and needs a reset of the GPU to change"
	}
	return "MIG is off and needs a reset of the GPU to change"
}
