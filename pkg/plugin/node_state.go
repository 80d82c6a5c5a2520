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

// rediscoverAfter is the number of polls after which the GPUs are discovered again
// although nothing seems to be wrong: a MIG mode that an administrator changed, or
// a GPU that was added, shows nowhere else. It is also the longest interval between
// attempts while something is wrong.
const rediscoverAfter = 6

// discovery is the result of reading everything about all GPUs.
type discovery struct {
	node *gpu.Node
	// inventory is built of node.
	inventory *device.Inventory
	err       error
}

// nodeState is what is known about the GPUs of this node. It joins discoveries and
// surveys, and decides when the GPUs must be discovered again. Time is counted in
// polls. It does nothing by itself and is for one goroutine.
type nodeState struct {
	// inventory is nil until the driver was there for the first time. GPUs that
	// were found once stay.
	inventory *device.Inventory
	// node is what the last successful discovery found.
	node *gpu.Node
	// missing are the GPUs that the last discovery did not find or could not read.
	missing []device.Condition
	// driverGone is why there is no driver any more, or nil.
	driverGone error
	// surveyed is the result of the last survey.
	surveyed device.Status

	// pollsLeft is the number of polls until the next discovery, retryAfter the
	// number between the last two while something was wrong.
	pollsLeft, retryAfter int
}

// applyDiscovery takes the result of a discovery. An error that says that there is
// no driver makes all GPUs unusable. Any other changes nothing: it concerns no GPU
// in particular, and a survey shows which ones do not answer.
func (s *nodeState) applyDiscovery(found discovery) {
	switch {
	case found.err == nil:
		inventory, kept := found.inventory.Keeping(s.inventory)
		s.inventory, s.node, s.missing, s.driverGone = inventory, found.node, missingGPUs(found.node, kept), nil
	case s.inventory != nil && isDriverGone(found.err):
		s.driverGone = found.err
	}
	switch {
	case s.inventory == nil || s.driverGone != nil:
		s.pollsLeft = 1
	case found.err != nil || len(s.missing) > 0 || len(s.failing()) > 0:
		s.retryAfter = min(max(1, 2*s.retryAfter), rediscoverAfter)
		s.pollsLeft = s.retryAfter
	default:
		s.retryAfter, s.pollsLeft = 0, rediscoverAfter
	}
}

// applySurvey takes the result of a survey. When a GPU begins or ceases to fail, a
// discovery is due at once.
func (s *nodeState) applySurvey(status device.Status) {
	before := s.failing()
	s.surveyed = status
	if !maps.Equal(before, s.failing()) {
		s.pollsLeft, s.retryAfter = 0, 0
	}
}

// countPoll counts a poll and reports whether a discovery is due.
func (s *nodeState) countPoll() (discoveryDue bool) {
	s.pollsLeft--
	return s.pollsLeft <= 0
}

// replaceInventory takes another inventory of the same GPUs. Those that are missing
// stay as they were.
func (s *nodeState) replaceInventory(inventory *device.Inventory) {
	s.inventory, _ = inventory.Keeping(s.inventory)
}

// status joins the conditions of all GPUs.
func (s *nodeState) status() device.Status {
	return device.Status{
		Static:     s.surveyed.Static,
		Conditions: unique(slices.Concat(s.withoutDriver(), s.missing, s.surveyed.Conditions)),
	}
}

// withoutDriver makes all GPUs unresponsive when the driver is gone.
func (s *nodeState) withoutDriver() []device.Condition {
	if s.driverGone == nil {
		return nil
	}
	var all []device.Condition
	for _, address := range pciAddresses(s.inventory) {
		all = append(all, device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: s.driverGone.Error()})
	}
	return all
}

// failing are the conditions of GPUs about which what was discovered may not hold
// any more.
func (s *nodeState) failing() map[conditionKey]bool {
	failing := map[conditionKey]bool{}
	for _, c := range s.surveyed.Conditions {
		switch c.Reason {
		case device.Lost, device.ResetRequired, device.Unresponsive:
			failing[keyOf(c)] = true
		}
	}
	return failing
}

// missingGPUs returns conditions for the GPUs that are broken, and for those among
// kept, which were found earlier, that the driver does not list any more.
func missingGPUs(node *gpu.Node, kept []string) []device.Condition {
	var conditions []device.Condition
	broken := map[string]bool{}
	for _, b := range node.Broken {
		// Without an address it is one of those that are not listed.
		if b.PCIAddress != "" {
			broken[b.PCIAddress] = true
			conditions = append(conditions, device.Condition{PCIAddress: b.PCIAddress, Reason: brokenReason(b.Err), Message: b.Reason})
		}
	}
	for _, address := range kept {
		if !broken[address] {
			conditions = append(conditions, device.Condition{
				PCIAddress: address, Reason: device.Lost,
				Message: "the driver does not list it any more",
			})
		}
	}
	return conditions
}

func brokenReason(err error) device.Reason {
	switch {
	case errors.Is(err, gpu.ErrLost):
		return device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		return device.ResetRequired
	}
	return device.Unresponsive
}

func isDriverGone(err error) bool {
	return errors.Is(err, gpu.ErrDriverNotLoaded) || errors.Is(err, gpu.ErrVersionMismatch)
}

// pciAddresses lists the GPUs of an inventory in published order.
func pciAddresses(inventory *device.Inventory) []string {
	var all []string
	for _, d := range inventory.Devices() {
		if address := d.GPU.PCIAddress; len(all) == 0 || all[len(all)-1] != address {
			all = append(all, address)
		}
	}
	return all
}
