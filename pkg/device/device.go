// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Kind tells what a device is. It is the value of the "type" attribute.
type Kind string

const (
	// Whole is an undivided GPU.
	Whole Kind = "gpu"
	// Partition is a MIG GPU instance with the one compute instance that
	// spans it.
	Partition Kind = "mig"
	// MPS is a GPU, or a partition, that several claims share through MPS.
	MPS Kind = "mps"
	// TimeSlice is a GPU, or a partition, that several claims share by turns.
	TimeSlice Kind = "timeslice"
)

// Device is one entry of a ResourceSlice.
type Device struct {
	// Name is unique on the node, a DNS label.
	Name string
	Kind Kind
	// GPU is the physical GPU. It belongs to the node that the inventory was
	// made of and must not be changed.
	GPU *gpu.GPU
	// Partition is nil for a whole GPU and for shares of one.
	Partition *PartitionShape
	// Share is not nil for the kinds MPS and TimeSlice. It must not be changed.
	Share *Share
	// Static is not nil for a partition that somebody else made. It must not
	// be changed.
	Static *Static
}

// Exclusive tells that one claim has the device alone.
func (d Device) Exclusive() bool { return d.Share == nil }

// Share says how a device is shared.
type Share struct {
	// Base is the name of the device that is shared: what it would be called if
	// one claim had it alone.
	Base string
	// Clients is how many claims can have a share.
	Clients int
	// MemoryBytes is what claims can ask for together. One claim gets
	// MaxMemoryBytes at most, and DefaultMemoryBytes where it asks for nothing in
	// particular; 0 means that nothing is reserved for it and nothing limits it.
	MemoryBytes, MaxMemoryBytes, DefaultMemoryBytes int64
	// Percent is the part of the multiprocessors that claims can ask for
	// together, DefaultPercent what a claim gets that does not ask; 0 means no
	// limit. Percent may be above 100, one claim gets at most 100.
	Percent, DefaultPercent int
	// Interval is for TimeSlice on a whole GPU, otherwise IntervalDefault.
	Interval policy.Interval
	// Limited tells that the memory and percentage of a TimeSlice share are
	// enforced by an interposer library in the containers.
	Limited bool
}

// Terms are what the admin wants published.
type Terms struct {
	// Policy may be nil for the built-in one.
	Policy *policy.Policy
	// Limited says that an interposer library enforces limits on TimeSlice shares
	// of this node.
	Limited bool
	// Keep are the names of devices that are published although the policy does
	// not offer them, because claims may have them. They get the taint Withdrawn.
	// Where a slice has no room for all devices these come first. Names of what
	// the hardware cannot be are ignored, as are unknown ones.
	Keep map[string]bool
}

// PartitionShape says which partition of its GPU a device is.
type PartitionShape struct {
	Profile   gpu.Profile
	Placement gpu.Placement
}

// Inventory is everything that a node can publish. It does not change once it
// is made, so that any number of goroutines may use it.
type Inventory struct {
	boards   []board
	devices  []Device
	index    map[string]int
	problems []error
}

// board is one GPU with all its devices.
type board struct {
	name string
	node *gpu.Node
	gpu  *gpu.GPU
	// devices do not depend on the status.
	devices []Device
	// places are all partitions that the GPU can hold, published or not, in the
	// order of the published ones.
	places []place
	// withdrawn are the names of devices that are published only because claims
	// may have them.
	withdrawn map[string]bool
	counters  *counterLayout

	// static and reasons are what the status adds: devices, and by the device's
	// name what is to be said against allocating it.
	static  []Device
	reasons map[string][]Reason
}

// all devices in published order. Nothing else fits in the place of a static
// one, so it is offered before a partition that would have to be cut out of a
// free GPU.
func (b board) all() []Device { return slices.Concat(b.static, b.devices) }

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// NewInventory works out the devices of a node. The inventory keeps pointers
// into the node, which must not change afterwards.
//
// It fails only where no inventory makes sense: no node, or one PCI address
// twice. What is wrong with a single GPU, or with what the policy wants of it,
// leaves that GPU or some of its devices out and is told by [Inventory.Problems].
func NewInventory(node *gpu.Node, terms Terms) (*Inventory, error) {
	if node == nil {
		return nil, errors.New("cannot make an inventory without facts about the node")
	}
	var boards []board
	var problems []error
	gpus := make([]*gpu.GPU, len(node.GPUs))
	for n := range node.GPUs {
		gpus[n] = &node.GPUs[n]
	}
	slices.SortStableFunc(gpus, func(a, b *gpu.GPU) int {
		return compareAddresses(a.PCIAddress, b.PCIAddress)
	})
	for n, g := range gpus {
		if n > 0 && gpus[n-1].PCIAddress == g.PCIAddress {
			return nil, fmt.Errorf("two GPUs with the PCI address %q", g.PCIAddress)
		}
		if !pciAddress.MatchString(g.PCIAddress) {
			problems = append(problems, fmt.Errorf("GPU %q (%s) is left out: its PCI address is not of the form dddd:bb:dd.f",
				g.PCIAddress, g.UUID))
			continue
		}
		b, wrong := newBoard(node, g, terms)
		for _, problem := range wrong {
			problems = append(problems, fmt.Errorf("GPU %s: %w", g.PCIAddress, problem))
		}
		boards = append(boards, b)
	}
	return assemble(boards, problems), nil
}

// compareAddresses orders by PCI domain, bus and device. A longer domain is a
// higher number.
func compareAddresses(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

// assemble makes an inventory of GPUs in order.
func assemble(boards []board, problems []error) *Inventory {
	i := &Inventory{boards: boards, index: map[string]int{}, problems: problems}
	for _, b := range boards {
		i.devices = append(i.devices, b.all()...)
	}
	for n, d := range i.devices {
		i.index[d.Name] = n
	}
	return i
}

// Devices lists all devices in published order. The caller owns the slice.
func (i *Inventory) Devices() []Device { return slices.Clone(i.devices) }

// Lookup finds a device by its name.
func (i *Inventory) Lookup(name string) (Device, bool) {
	n, ok := i.index[name]
	if !ok {
		return Device{}, false
	}
	return i.devices[n], true
}

// Problems tells what could not be published as the policy wants it and why, one
// error for each thing. None is the normal case.
func (i *Inventory) Problems() []error { return slices.Clone(i.problems) }

// Withdrawn are the names of the devices that are published although the policy
// does not offer them, in published order.
func (i *Inventory) Withdrawn() []string {
	var names []string
	for _, b := range i.boards {
		for _, d := range b.all() {
			if b.withdrawn[d.Name] {
				names = append(names, d.Name)
			}
		}
	}
	return names
}
