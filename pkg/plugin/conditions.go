// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/policy"
)

// conditionKey identifies a condition, whatever its message.
type conditionKey struct {
	pciAddress string
	reason     device.Reason
	kind       device.Kind
	value      string
	everywhere bool
	where      gpu.Placement
	exact      bool
}

func keyOf(c device.Condition) conditionKey {
	key := conditionKey{
		pciAddress: c.PCIAddress, reason: c.Reason, kind: c.Kind, value: c.Value, everywhere: c.Where == nil, exact: c.Exact,
	}
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

// repeatAfter is how long an event about a condition that lasts is left alone, less up to
// repeatJitter. API servers keep events for an hour by default.
const (
	repeatAfter  = 50 * time.Minute
	repeatJitter = 10 * time.Minute
)

// repeatAt returns when to repeat an event: not at the same time on all nodes.
func repeatAt(now time.Time) time.Time {
	return now.Add(repeatAfter - rand.N(repeatJitter)) //nolint:gosec // no secret
}

// conditionReporter logs conditions when they appear and when they disappear, and makes
// events of them: of the node, and of the claims and pods that have the devices. It is for
// one goroutine.
type conditionReporter struct {
	events   EventWriter
	claims   ClaimViewer
	reported logchange.Set[conditionKey, device.Condition]
	statics  logchange.Set[string, string]
	// lasting are the events about conditions that are still there.
	lasting []*conditionEvent
	users   affectedUsers
}

func (r *conditionReporter) report(ctx context.Context, status device.Status) {
	logger := klog.FromContext(ctx)
	appeared, disappeared := r.reported.Update(status.Conditions, keyOf)
	for _, c := range appeared {
		logger.Info(whatFollows(c.EffectInForce()), append(details(c), "message", c.Message)...)
	}
	for _, c := range disappeared {
		logger.Info("A condition of devices is over", details(c)...)
	}
	r.reportStatics(ctx, status.Static)
	r.reportNode(ctx, appeared, disappeared, status.Conditions)
	r.users.report(ctx, r.events, r.claims, status.Conditions)
}

// reportNode writes events about the conditions of the node.
func (r *conditionReporter) reportNode(ctx context.Context, appeared, disappeared, now []device.Condition) {
	at := time.Now()
	gone := map[conditionKey]bool{}
	for _, c := range disappeared {
		gone[keyOf(c)] = true
	}
	for _, e := range r.lasting {
		e.conditions = slices.DeleteFunc(e.conditions, func(c device.Condition) bool { return gone[keyOf(c)] })
	}
	r.lasting = slices.DeleteFunc(r.lasting, func(e *conditionEvent) bool { return len(e.conditions) == 0 })
	for _, e := range recoveriesOf(disappeared, now) {
		r.events.GPU(ctx, e.pciAddresses, corev1.EventTypeNormal, recoveryReason(e.reason), e.recoveryText())
	}
	for _, e := range r.lasting {
		if !at.Before(e.repeat) {
			r.events.GPU(ctx, e.pciAddresses, corev1.EventTypeWarning, eventReason(e.reason), e.told)
			e.repeat = repeatAt(at)
		}
	}
	for _, e := range eventsOf(appeared) {
		e.told, e.repeat = e.text(), repeatAt(at)
		r.events.GPU(ctx, e.pciAddresses, corev1.EventTypeWarning, eventReason(e.reason), e.told)
		r.lasting = append(r.lasting, e)
	}
}

// reasonStaticPartitions is the reason of an event.
const reasonStaticPartitions = "GPUPartitionsOfOthers"

// reportStatics says once which partitions somebody else has made. They are nothing to
// repair, and may be there on purpose.
func (r *conditionReporter) reportStatics(ctx context.Context, all []device.Static) {
	byGPU := map[string][]string{}
	for _, s := range all {
		if !s.Gone {
			byGPU[s.PCIAddress] = append(byGPU[s.PCIAddress], s.UUID)
		}
	}
	var texts []string
	for _, address := range slices.Sorted(maps.Keys(byGPU)) {
		slices.Sort(byGPU[address])
		texts = append(texts, fmt.Sprintf("GPU %s: partitions that were not made by this driver are offered as they are, and nothing that overlaps them: %s",
			address, strings.Join(byGPU[address], ", ")))
	}
	appeared, _ := r.statics.Update(texts, func(text string) string { return text })
	for _, text := range appeared {
		klog.FromContext(ctx).Info(text)
		r.events.Node(ctx, corev1.EventTypeNormal, reasonStaticPartitions, text)
	}
}

// whatFollows says what an effect does.
func whatFollows(effect policy.Effect) string {
	switch effect {
	case policy.EffectNone:
		return "Devices have a condition"
	case policy.EffectNoExecute:
		return "Devices are not offered for now, and pods that use them are evicted"
	}
	return "Devices are not offered for now"
}

func details(c device.Condition) []any {
	pairs := []any{"pciAddress", c.PCIAddress, "reason", c.Reason, "effect", c.EffectInForce()}
	if c.Value != "" {
		pairs = append(pairs, "value", c.Value)
	}
	if c.Kind != "" {
		pairs = append(pairs, "type", c.Kind)
	}
	if c.Where != nil {
		pairs = append(pairs, "firstMemorySlice", c.Where.Start, "memorySlices", c.Where.Size)
	}
	return pairs
}

// conditionEvent reports conditions of some GPUs for the same reason.
type conditionEvent struct {
	reason       device.Reason
	message      string
	pciAddresses []string
	conditions   []device.Condition
	// told is the text, and repeat when it has to be repeated, of an event that was
	// written.
	told   string
	repeat time.Time
}

// nodeWide are the reasons that may concern a node rather than a GPU.
var nodeWide = []device.Reason{device.MPSUnavailable, device.Unresponsive, device.ForeignClaim}

// eventsOf joins the conditions with the same message on one GPU, and on several where it
// is the node's: that nothing starts MPS, or that there is no driver, concerns them all.
func eventsOf(conditions []device.Condition) []*conditionEvent {
	var events []*conditionEvent
	for _, c := range conditions {
		message := withoutAddress(c.Message, c.PCIAddress)
		at := slices.IndexFunc(events, func(e *conditionEvent) bool {
			return e.reason == c.Reason && e.message == message &&
				(slices.Contains(nodeWide, c.Reason) || slices.Contains(e.pciAddresses, c.PCIAddress))
		})
		if at < 0 {
			at = len(events)
			events = append(events, &conditionEvent{reason: c.Reason, message: message})
		}
		e := events[at]
		e.conditions = append(e.conditions, c)
		if !slices.Contains(e.pciAddresses, c.PCIAddress) {
			e.pciAddresses = append(e.pciAddresses, c.PCIAddress)
		}
	}
	return events
}

// recoveriesOf are events about what is over: one for each reason, and for each GPU unless
// it may be the node's. There is none where the GPU has another such condition now, or does
// not work for another reason.
func recoveriesOf(disappeared, now []device.Condition) []*conditionEvent {
	over := slices.DeleteFunc(slices.Clone(disappeared), func(was device.Condition) bool {
		return slices.ContainsFunc(now, func(is device.Condition) bool {
			return is.PCIAddress == was.PCIAddress && (is.Reason == was.Reason || slices.Contains(failures, is.Reason))
		})
	})
	for i := range over {
		over[i].Message = ""
	}
	return eventsOf(over)
}

// failures are the reasons for which nothing works on a GPU.
var failures = []device.Reason{device.Lost, device.ResetRequired, device.Unresponsive}

func (e *conditionEvent) gpus() string {
	if len(e.pciAddresses) > 1 {
		return "GPUs " + strings.Join(e.pciAddresses, ", ")
	}
	return "GPU " + e.pciAddresses[0]
}

// abbreviations are words of reasons that are in capitals in the reasons of events.
var abbreviations = map[string]string{"xid": "XID", "ecc": "ECC"}

// eventReason makes GPUResetRequired of reset-required, GPULost of gpu-lost and
// MPSUnhealthy of mps-unhealthy.
func eventReason(reason device.Reason) string {
	var name strings.Builder
	rest, found := strings.CutPrefix(string(reason), "mps-")
	if found {
		name.WriteString("MPS")
	} else {
		name.WriteString("GPU")
		rest = strings.TrimPrefix(rest, "gpu-")
	}
	for word := range strings.SplitSeq(rest, "-") {
		if word != "" {
			name.WriteString(cmp.Or(abbreviations[word], strings.ToUpper(word[:1])+word[1:]))
		}
	}
	return name.String()
}
