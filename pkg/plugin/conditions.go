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
	"github.com/partage-dev/partage/pkg/logchange"
)

// conditionKey identifies a condition, whatever its message.
type conditionKey struct {
	pciAddress string
	reason     device.Reason
	kind       device.Kind
	everywhere bool
	where      gpu.Placement
}

func keyOf(c device.Condition) conditionKey {
	key := conditionKey{pciAddress: c.PCIAddress, reason: c.Reason, kind: c.Kind, everywhere: c.Where == nil}
	if c.Where != nil {
		key.where = *c.Where
	}
	return key
}

// unique keeps the first of several conditions with the same key.
func unique(conditions []device.Condition) []device.Condition {
	seen := map[conditionKey]bool{}
	var first []device.Condition
	for _, c := range conditions {
		if key := keyOf(c); !seen[key] {
			seen[key] = true
			first = append(first, c)
		}
	}
	return first
}

// conditionReporter logs conditions when they appear and when they disappear, and
// makes events of the node of those that appear.
type conditionReporter struct {
	events   claim.Events
	reported logchange.Set[conditionKey, device.Condition]
}

func (r *conditionReporter) report(ctx context.Context, status device.Status) {
	logger := klog.FromContext(ctx)
	appeared, disappeared := r.reported.Update(reportable(status), keyOf)
	for _, c := range appeared {
		logger.Info("Devices are not offered for now", append(details(c), "message", c.Message)...)
	}
	for _, event := range eventsOf(appeared) {
		r.events.Warn(ctx, claim.Ref{}, eventReason(event.reason), event.text())
	}
	for _, c := range disappeared {
		logger.Info("Devices are offered again", details(c)...)
	}
}

// reportable are all conditions, and the partitions that others made.
func reportable(status device.Status) []device.Condition {
	all := slices.Clone(status.Conditions)
	for _, s := range status.Static {
		if !s.Gone {
			all = append(all, device.Condition{
				PCIAddress: s.PCIAddress, Where: &s.Placement, Reason: device.Occupied,
				Message: fmt.Sprintf("partition %s was not made by this driver; it is offered as it is, and nothing else that overlaps it", s.UUID),
			})
		}
	}
	return all
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

// conditionEvent reports a condition of some GPUs.
type conditionEvent struct {
	reason       device.Reason
	message      string
	pciAddresses []string
}

// eventsOf joins the conditions with the same message on several GPUs into one
// event: that nothing on a node starts MPS concerns them all.
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
