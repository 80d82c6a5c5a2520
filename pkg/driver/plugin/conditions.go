// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// conditionKey identifies a condition, whatever its message. The condition in it has no pointers.
type conditionKey struct {
	device.Condition
	everywhere bool
	where      gpu.Placement
}

func keyOf(c device.Condition) conditionKey {
	key := conditionKey{Condition: c, everywhere: c.Where == nil, where: ptr.Deref(c.Where, gpu.Placement{})}
	key.Message, key.Effect, key.Undivided, key.Where, key.ProfileID = "", "", false, nil, nil
	return key
}

// join keeps the first of several conditions with the same key. The policy decides about effects that are not decided yet, if it has
// any for the reason.
func join(reaction *policy.Health, all ...[]device.Condition) (joined []device.Condition) {
	seen := map[conditionKey]bool{}
	for _, c := range slices.Concat(all...) {
		if key := keyOf(c); !seen[key] {
			seen[key] = true
			c.Effect = cmp.Or(c.Effect, reaction.Conditions[string(c.Reason)])
			joined = append(joined, c)
		}
	}
	return joined
}

// conditionStatements say what holds of the GPUs of a node. Another effect is another event: people read whether pods are evicted.
func conditionStatements(status device.Status) (all []events.Statement) {
	for _, c := range status.Conditions {
		key := keyOf(c)
		key.Effect = c.EffectInForce()
		all = append(all, events.Statement{Key: key, Event: events.Event{
			Reason: eventReason(c.Reason), Subjects: []string{c.PCIAddress}, Text: adminText(c),
		}})
	}
	return append(all, staticStatements(status.Static)...)
}

// recovery says that a condition is over.
func recovery(was device.Condition) events.Event {
	offered := ""
	if keepsAway(was) {
		offered = "Devices are offered again"
	}
	return events.Event{
		Type: corev1.EventTypeNormal, Reason: recoveryReason(was.Reason), Subjects: []string{was.PCIAddress},
		Text: sentences(overText(was.Reason), offered),
	}
}

// reasonStaticPartitions is the reason of an event.
const reasonStaticPartitions = "GPUPartitionsOfOthers"

// staticStatements say which partitions somebody else has made. They are nothing to repair, and may be there on purpose.
func staticStatements(partitions []device.Static) (all []events.Statement) {
	byGPU := map[string][]string{}
	for _, one := range partitions {
		if !one.Gone {
			byGPU[one.PCIAddress] = append(byGPU[one.PCIAddress], one.UUID)
		}
	}
	for address, uuids := range byGPU {
		slices.Sort(uuids)
		text := "partitions that were not made by this driver are offered as they are, and nothing that overlaps them: " + strings.Join(uuids, ", ")
		all = append(all, events.Statement{Key: address + text, Event: events.Event{
			Type: corev1.EventTypeNormal, Reason: reasonStaticPartitions, Subjects: []string{address}, Text: text,
		}})
	}
	return all
}

// claimStatements say what a survey has found of claims.
func claimStatements(found []claim.Statement) (all []events.Statement) {
	for _, s := range found {
		key := s
		key.Text = "" // names processes, which come and go
		one := events.Statement{Key: key, Event: events.Event{Claim: s.Claim, Reason: s.Reason, Text: s.Text}}
		if s.Device != "" {
			one.Subjects = []string{s.Device}
		}
		all = append(all, one)
	}
	return all
}

// failures are the reasons for which nothing works on a GPU.
var failures = []device.Reason{device.Lost, device.ResetRequired, device.Unresponsive}

func isFailure(c device.Condition) bool { return slices.Contains(failures, c.Reason) }

// NewEvents makes what tells people, until ctx ends, with a client for events of the node and one for those of its users.
func NewEvents(ctx context.Context, node, users kubernetes.Interface, component, nodeName string) *events.Recorder {
	return events.New(ctx, events.Options{Component: component, NodeName: nodeName, Node: node, Users: users, Claim: NewCluster(users).Claim})
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
