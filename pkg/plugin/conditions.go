// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// conditionKey is what makes two conditions the same, whatever they say.
type conditionKey struct {
	pciAddress string
	reason     device.Reason
	kind       device.Kind
	all        bool
	where      gpu.Placement
}

func keyOf(c device.Condition) conditionKey {
	key := conditionKey{pciAddress: c.PCIAddress, reason: c.Reason, kind: c.Kind, all: c.Where == nil}
	if c.Where != nil {
		key.where = *c.Where
	}
	return key
}

// unique keeps the first of several conditions that are the same.
func unique(conditions []device.Condition) []device.Condition {
	return without(conditions, nil)
}

// without keeps, once each, the conditions that are not among the others.
func without(conditions, others []device.Condition) []device.Condition {
	seen := map[conditionKey]bool{}
	for _, c := range others {
		seen[keyOf(c)] = true
	}
	var rest []device.Condition
	for _, c := range conditions {
		if key := keyOf(c); !seen[key] {
			seen[key] = true
			rest = append(rest, c)
		}
	}
	return rest
}

// notices remembers the conditions that people have been told about.
type notices struct {
	told []device.Condition
}

// changes returns what has come and what has gone since the last call.
func (n *notices) changes(now []device.Condition) (appeared, ceased []device.Condition) {
	appeared, ceased = without(now, n.told), without(n.told, now)
	n.told = now
	return appeared, ceased
}

// tell logs conditions when they come and when they go, and makes events of the
// node of those that come.
func (p *Plugin) tell(ctx context.Context, status device.Status) {
	logger := klog.FromContext(ctx)
	appeared, ceased := p.notices.changes(noticeable(status))
	for _, c := range appeared {
		logger.Info("Devices are not offered for now", append(details(c), "message", c.Message)...)
	}
	if p.Events != nil {
		for _, event := range eventsOf(appeared) {
			p.Events.Warn(ctx, claim.Ref{}, eventReason(event.reason), event.text())
		}
	}
	for _, c := range ceased {
		logger.Info("Devices are offered again", details(c)...)
	}
}

// noticeable are all conditions. A partition that somebody else made is one too.
func noticeable(status device.Status) []device.Condition {
	all := slices.Clone(status.Conditions)
	for _, s := range status.Static {
		if !s.Gone {
			all = append(all, device.Condition{
				PCIAddress: s.PCIAddress, Where: &s.Placement, Reason: device.Occupied,
				Message: fmt.Sprintf("partition %s was not made by this driver; it is offered as it is, and nothing else that overlaps it", s.UUID),
			})
		}
	}
	return unique(all)
}

func details(c device.Condition) []any {
	pairs := []any{"pciAddress", c.PCIAddress, "reason", c.Reason}
	if c.Kind != "" {
		pairs = append(pairs, "type", c.Kind)
	}
	if c.Where != nil {
		pairs = append(pairs, "firstMemorySlice", c.Where.Start, "memorySlices", c.Where.Size)
	}
	return pairs
}

// conditionEvent is a condition of some GPUs, as people are told of it.
type conditionEvent struct {
	reason       device.Reason
	message      string
	pciAddresses []string
}

// eventsOf makes one event of what is the same on several GPUs: that nothing starts
// MPS on a node concerns them all.
func eventsOf(conditions []device.Condition) []conditionEvent {
	var events []conditionEvent
	for _, c := range conditions {
		at := slices.IndexFunc(events, func(e conditionEvent) bool { return e.reason == c.Reason && e.message == c.Message })
		switch {
		case at < 0:
			events = append(events, conditionEvent{reason: c.Reason, message: c.Message, pciAddresses: []string{c.PCIAddress}})
		case !slices.Contains(events[at].pciAddresses, c.PCIAddress):
			events[at].pciAddresses = append(events[at].pciAddresses, c.PCIAddress)
		}
	}
	return events
}

func (e conditionEvent) text() string {
	switch {
	case len(e.pciAddresses) > 1:
		return fmt.Sprintf("GPUs %s: %s", strings.Join(e.pciAddresses, ", "), e.message)
	case strings.Contains(e.message, e.pciAddresses[0]):
		return e.message
	}
	return fmt.Sprintf("GPU %s: %s", e.pciAddresses[0], e.message)
}

// eventReason makes GPUResetRequired of reset-required and MPSUnhealthy of
// mps-unhealthy.
func eventReason(reason device.Reason) string {
	var name strings.Builder
	rest, found := strings.CutPrefix(string(reason), "mps-")
	if found {
		name.WriteString("MPS")
	} else {
		name.WriteString("GPU")
	}
	for word := range strings.SplitSeq(rest, "-") {
		if word != "" {
			name.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return name.String()
}
