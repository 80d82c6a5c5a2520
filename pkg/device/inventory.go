// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync/atomic"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Terms decide which of the possible devices are published.
type Terms struct {
	// Policy may be nil for the built-in one.
	Policy *policy.Policy
	// Limited says that an interposer library enforces limits on TimeSlice shares
	// of this node.
	Limited bool
	// ExtendedResources says that the kubelet of this node [KnowsExtendedResources].
	ExtendedResources bool
	// Keep has the names of devices that are published although the policy does
	// not offer them, because claims may have them. They get the taint Withdrawn.
	// Where the GPU's slice has no room for them they get one of their own. Names of
	// devices that the hardware does not have are ignored.
	Keep map[string]bool
}

// Inventory has everything that a node can publish. Callers cannot change it, so that any
// number of goroutines may use it.
type Inventory struct {
	boards []board
	// devices are what claims use, without observers.
	devices []Device
	// byName has the observers, too.
	byName   map[string]Device
	problems []error
	// last is what With has returned last, and for which status.
	last atomic.Pointer[withStatus]
}

type withStatus struct {
	status    Status
	inventory *Inventory
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
	// overflow are those among withdrawn for which the GPU's own slice has no room.
	overflow map[string]bool
	counters *counterLayout
	// extended says that pods can have the devices by an extended resource.
	extended bool

	// static and taints are what the status adds: devices, and taints by the device's
	// name.
	static []Device
	taints map[string][]taint
}

// all returns the devices in published order. Static ones come first: nothing else
// fits in their place, while other partitions take a part of a free GPU.
func (b board) all() []Device { return slices.Concat(b.static, b.devices) }

// observer is published where anything is. What the policy and the status say of the GPU
// does not matter to it.
func (b board) observer() Device {
	return Device{Name: observerName(b.name), Kind: Observer, GPU: b.gpu}
}

var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// NewInventory determines the devices of a node. The inventory keeps pointers
// into the node, which must not change afterwards.
//
// It fails only where no inventory makes sense: without a node, or with one PCI
// address twice. A fault of a single GPU, or in what the policy wants of it, leaves
// that GPU or some of its devices out and is reported by [Inventory.Problems].
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
		return gpu.ComparePCIAddresses(a.PCIAddress, b.PCIAddress)
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

// assemble makes an inventory of GPUs in order.
func assemble(boards []board, problems []error) *Inventory {
	i := &Inventory{boards: boards, byName: map[string]Device{}, problems: problems}
	for _, b := range boards {
		i.devices = append(i.devices, b.all()...)
		for _, d := range append(b.all(), b.observer()) {
			i.byName[d.Name] = d
		}
	}
	return i
}

// Devices lists all devices that claims use, in published order, without observers. The
// caller owns the slice.
func (i *Inventory) Devices() []Device { return slices.Clone(i.devices) }

// Lookup finds a device by its name, also an observer.
func (i *Inventory) Lookup(name string) (Device, bool) {
	d, ok := i.byName[name]
	return d, ok
}

// Problems returns what could not be published as the policy wants it and why.
// Normally there are none.
func (i *Inventory) Problems() []error { return slices.Clone(i.problems) }

// Withdrawn returns the names of the devices that are published although the policy
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
