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

// tell logs conditions when they come and when they go, and makes an event of the
// node of each that comes.
func (p *Plugin) tell(ctx context.Context, status device.Status) {
	logger := klog.FromContext(ctx)
	appeared, ceased := p.notices.changes(noticeable(status))
	for _, c := range appeared {
		logger.Info("Devices are not offered for now", append(details(c), "message", c.Message)...)
		if p.Events != nil {
			p.Events.Warn(ctx, claim.Ref{}, eventReason(c.Reason), eventMessage(c))
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
	if c.Where != nil {
		pairs = append(pairs, "firstMemorySlice", c.Where.Start, "memorySlices", c.Where.Size)
	}
	return pairs
}

// eventReason makes GPUResetRequired of reset-required.
func eventReason(reason device.Reason) string {
	var name strings.Builder
	name.WriteString("GPU")
	for word := range strings.SplitSeq(string(reason), "-") {
		if word != "" {
			name.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return name.String()
}

func eventMessage(c device.Condition) string {
	if strings.Contains(c.Message, c.PCIAddress) {
		return c.Message
	}
	return fmt.Sprintf("GPU %s: %s", c.PCIAddress, c.Message)
}
