// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// thorough is after how many looks the GPUs are discovered anew although nothing
// seems to be wrong: a MIG mode that an administrator changed, or a GPU that was
// added, shows nowhere else. It also bounds how rarely that is tried while
// something is wrong.
const thorough = 6

// overview is what is known about the GPUs of this node. It joins what discovery
// found with what a survey says, and decides when they must be discovered anew.
// Time is counted in looks. It does nothing by itself and is for one goroutine.
type overview struct {
	// inventory is nil until the driver was there for the first time. GPUs that
	// were found once stay.
	inventory *device.Inventory
	// node is what the last successful discovery found.
	node *gpu.Node
	// absent are the GPUs that the last discovery did not find or could not read.
	absent []device.Condition
	// gone is why there is no driver any more, or nil.
	gone     error
	surveyed device.Status

	// left is the number of looks until the next discovery, patience the
	// number between the last two while something was wrong.
	left, patience int
}

// discovered takes the result of a discovery. An error that says that there is no
// driver makes all GPUs unusable. Any other changes nothing: it concerns no GPU
// in particular, and a survey tells which ones do not answer.
func (o *overview) discovered(found discovery) {
	switch {
	case found.err == nil:
		inventory, kept := found.inventory.Keeping(o.inventory)
		o.inventory, o.node, o.absent, o.gone = inventory, found.node, absent(found.node, kept), nil
	case o.inventory != nil && driverGone(found.err):
		o.gone = found.err
	}
	switch {
	case o.inventory == nil || o.gone != nil:
		o.left = 1
	case found.err != nil || len(o.absent) > 0 || len(o.troubled()) > 0:
		o.patience = min(max(1, 2*o.patience), thorough)
		o.left = o.patience
	default:
		o.patience, o.left = 0, thorough
	}
}

// survey takes what a look has shown. A GPU that fails, or does so no more, is
// discovered at once.
func (o *overview) survey(status device.Status) {
	before := o.troubled()
	o.surveyed = status
	if !maps.Equal(before, o.troubled()) {
		o.left, o.patience = 0, 0
	}
}

// due counts a look and tells whether the GPUs must be discovered now.
func (o *overview) due() bool {
	o.left--
	return o.left <= 0
}

// remade takes another inventory of the same GPUs. Those that are away stay as they
// were.
func (o *overview) remade(inventory *device.Inventory) {
	o.inventory, _ = inventory.Keeping(o.inventory)
}

// status is what is the case on all GPUs.
func (o *overview) status() device.Status {
	return device.Status{
		Static:     o.surveyed.Static,
		Conditions: unique(slices.Concat(o.unusable(), o.absent, o.surveyed.Conditions)),
	}
}

// unusable are all GPUs when the driver is gone.
func (o *overview) unusable() []device.Condition {
	if o.gone == nil {
		return nil
	}
	var all []device.Condition
	for _, address := range addresses(o.inventory) {
		all = append(all, device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: o.gone.Error()})
	}
	return all
}

// troubled are the GPUs whose condition may mean that what is known about them
// does not hold any more.
func (o *overview) troubled() map[conditionKey]bool {
	troubled := map[conditionKey]bool{}
	for _, c := range o.surveyed.Conditions {
		switch c.Reason {
		case device.Lost, device.ResetRequired, device.Unresponsive:
			troubled[keyOf(c)] = true
		}
	}
	return troubled
}

// absent are the GPUs that are broken, and those that were there earlier and are
// not any more, which are among the kept ones.
func absent(node *gpu.Node, kept []string) []device.Condition {
	var conditions []device.Condition
	broken := map[string]bool{}
	for _, b := range node.Broken {
		// Without an address it is one of those that are missing.
		if b.PCIAddress != "" {
			broken[b.PCIAddress] = true
			conditions = append(conditions, device.Condition{PCIAddress: b.PCIAddress, Reason: reasonOf(b.Err), Message: b.Reason})
		}
	}
	for _, address := range kept {
		if !broken[address] {
			conditions = append(conditions, device.Condition{
				PCIAddress: address, Reason: device.Lost,
				Message: "it was there earlier and the driver does not list it any more",
			})
		}
	}
	return conditions
}

func reasonOf(err error) device.Reason {
	switch {
	case errors.Is(err, gpu.ErrLost):
		return device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		return device.ResetRequired
	}
	return device.Unresponsive
}

func driverGone(err error) bool {
	return errors.Is(err, gpu.ErrDriverNotLoaded) || errors.Is(err, gpu.ErrVersionMismatch)
}

// addresses lists the GPUs of an inventory in published order.
func addresses(inventory *device.Inventory) []string {
	var all []string
	for _, d := range inventory.Devices() {
		if address := d.GPU.PCIAddress; len(all) == 0 || all[len(all)-1] != address {
			all = append(all, address)
		}
	}
	return all
}
