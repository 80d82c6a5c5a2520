// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// rediscoverAfter is the number of polls after which the GPUs are discovered again
// although nothing seems to be wrong: a MIG mode that an administrator changed, or
// a GPU that was added, shows nowhere else. It is also the longest interval between
// attempts while something is wrong.
const rediscoverAfter = 6

// nodeState is what is known about the GPUs of this node. It joins discoveries and
// surveys, and decides when the GPUs must be discovered again. Time is counted in
// polls. It does nothing by itself and is for one goroutine.
type nodeState struct {
	// known are all GPUs that were found in this boot of the machine, also by an
	// earlier process, as they were found last. It is nil until there are any.
	known *gpu.Node
	// earlier are GPUs among known that were found in an earlier boot only, or were
	// taken out. They stay as long as claims have devices of them.
	earlier map[string]bool
	// inventory is built of known.
	inventory *device.Inventory
	// discovered says that a discovery of this process has succeeded.
	discovered bool
	// missing are the GPUs that the last discovery did not find or could not read.
	missing []device.Condition
	// driverGone is why no GPU can be used, or nil.
	driverGone error
	// surveyed is the result of the last survey.
	surveyed device.Status

	// pollsLeft is the number of polls until the next discovery, retryAfter the
	// number between the last two while something was wrong.
	pollsLeft, retryAfter int
}

// merge returns the GPUs of a successful discovery, and those that it lacks as they
// were known before, whose PCI addresses it returns as well.
func (s *nodeState) merge(found *gpu.Node) (all *gpu.Node, kept []string) {
	return found.Keeping(s.known)
}

// recall takes what was known to an earlier process, and the inventory of it. Nothing
// is known to be there until a discovery has succeeded.
func (s *nodeState) recall(known *gpu.Node, earlier map[string]bool, inventory *device.Inventory) {
	s.known, s.earlier, s.inventory = known, earlier, inventory
}

// applyDiscovery takes the result of a successful discovery, and the inventory of all
// that is known now.
func (s *nodeState) applyDiscovery(found *gpu.Node, inventory *device.Inventory) {
	all, kept := s.merge(found)
	maps.DeleteFunc(s.earlier, func(pciAddress string, _ bool) bool { return !slices.Contains(kept, pciAddress) })
	s.known, s.inventory, s.missing = all, inventory, missingGPUs(found, kept)
	s.discovered, s.driverGone = true, nil
	if len(s.missing) > 0 || len(s.failing()) > 0 {
		s.retryDiscovery()
		return
	}
	s.retryAfter, s.pollsLeft = 0, rediscoverAfter
}

// discoveryFailed takes the error of a discovery. One that says that there is no
// driver makes all GPUs unusable, and so does any other before the first success.
// Later ones change nothing: they concern no GPU in particular, and a survey shows
// which ones do not answer.
func (s *nodeState) discoveryFailed(err error) {
	if !s.discovered || isDriverGone(err) {
		s.driverGone = err
	}
	if s.driverGone != nil {
		s.pollsLeft = 1
		return
	}
	s.retryDiscovery()
}

// retryDiscovery makes a discovery due more and more rarely.
func (s *nodeState) retryDiscovery() {
	s.retryAfter = min(max(1, 2*s.retryAfter), rediscoverAfter)
	s.pollsLeft = s.retryAfter
}

// unneeded returns the GPUs among earlier of which claims have no device any more.
func (s *nodeState) unneeded(mayBeInUse func(pciAddress string) bool) []string {
	var unneeded []string
	for address := range s.earlier {
		if !mayBeInUse(address) {
			unneeded = append(unneeded, address)
		}
	}
	return gpu.SortPCIAddresses(unneeded)
}

// forget forgets GPUs, and takes the inventory without them.
func (s *nodeState) forget(pciAddresses []string, rest *gpu.Node, inventory *device.Inventory) {
	s.known, s.inventory = rest, inventory
	forgotten := func(pciAddress string) bool { return slices.Contains(pciAddresses, pciAddress) }
	maps.DeleteFunc(s.earlier, func(pciAddress string, _ bool) bool { return forgotten(pciAddress) })
	s.missing = slices.DeleteFunc(s.missing, func(c device.Condition) bool { return forgotten(c.PCIAddress) })
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

// status joins the conditions of all GPUs with more, such as those of their health. The policy decides
// about effects that are not decided yet, if it has any for the reason.
func (s *nodeState) status(more []device.Condition, reaction *policy.Health) device.Status {
	conditions := unique(slices.Concat(s.withoutDriver(), s.missing, s.surveyed.Conditions, more))
	for i := range conditions {
		conditions[i].Effect = cmp.Or(conditions[i].Effect, reaction.Conditions[string(conditions[i].Reason)])
	}
	return device.Status{Static: s.surveyed.Static, Conditions: conditions}
}

// uuids are those of all known GPUs by PCI address.
func (s *nodeState) uuids() map[string]string {
	uuids := map[string]string{}
	if s.known != nil {
		for i := range s.known.GPUs {
			uuids[s.known.GPUs[i].PCIAddress] = s.known.GPUs[i].UUID
		}
	}
	return uuids
}

// withoutDriver makes all GPUs unresponsive when the driver is gone.
func (s *nodeState) withoutDriver() []device.Condition {
	if s.driverGone == nil || s.known == nil {
		return nil
	}
	var all []device.Condition
	for i := range s.known.GPUs {
		all = append(all, device.Condition{PCIAddress: s.known.GPUs[i].PCIAddress, Reason: device.Unresponsive, Message: s.driverGone.Error()})
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
func missingGPUs(found *gpu.Node, kept []string) []device.Condition {
	var conditions []device.Condition
	// Some GPUs that are broken are those among kept whose addresses cannot be read.
	var nameless []gpu.Broken
	broken := map[string]bool{}
	for _, b := range found.Broken {
		if b.PCIAddress == "" {
			nameless = append(nameless, b)
			continue
		}
		broken[b.PCIAddress] = true
		if gpu.IsPending(b.Err) && !errors.Is(b.Err, gpu.ErrHung) {
			continue // it is slow, or waits behind another one: nothing is known to be wrong with it
		}
		conditions = append(conditions, conditionOf(b, b.PCIAddress))
	}
	unlisted := slices.DeleteFunc(slices.Clone(kept), func(address string) bool { return broken[address] })
	for i, address := range unlisted {
		if len(nameless) == len(unlisted) {
			// Both are in the order of the addresses.
			conditions = append(conditions, conditionOf(nameless[i], address))
			continue
		}
		conditions = append(conditions, device.Condition{
			PCIAddress: address, Reason: device.Lost,
			Message: "the driver does not list it any more",
		})
	}
	return conditions
}

func conditionOf(b gpu.Broken, pciAddress string) device.Condition {
	return device.Condition{PCIAddress: pciAddress, Reason: brokenReason(b.Err), Message: b.Reason}
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
