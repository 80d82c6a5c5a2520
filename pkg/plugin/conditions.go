// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/events"
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

// conditionSpeaker says what holds of conditions: of the node, and to the users of devices. It is for one goroutine.
type conditionSpeaker struct {
	board  *events.Board
	claims ClaimViewer
	// isThere reports whether the node has a GPU, which has not recovered when it was taken out.
	isThere func(pciAddress string) bool
	problem logchange.Problem
	// before are the conditions that were said last.
	before map[speakerKey]device.Condition
}

// speakerKey tells conditions apart that are told apart: people read whether pods are evicted.
type speakerKey struct {
	conditionKey
	effect policy.Effect
}

func (s *conditionSpeaker) say(ctx context.Context, status device.Status) {
	var statements []events.Statement
	now := map[speakerKey]device.Condition{}
	for _, c := range status.Conditions {
		key := speakerKey{keyOf(c), c.EffectInForce()}
		now[key] = c
		statements = append(statements, events.Statement{Key: key, Calm: calmOf(c), Event: events.Event{
			Reason: eventReason(c.Reason), Subjects: []string{c.PCIAddress}, Text: adminText(c),
		}})
	}
	s.board.Say(ctx, "conditions", statements, func(was events.Statement) (events.Event, bool) {
		key, _ := was.Key.(speakerKey)
		c := s.before[key]
		return recovery(c), s.isThere(c.PCIAddress) && !isInTrouble(c, status.Conditions)
	})
	s.before = now
	s.sayStatics(ctx, status.Static)
	s.sayToUsers(ctx, status.Conditions)
}

// calmOf is how long a condition must be away to be over for people: one without effect comes and goes on a GPU at its limit.
func calmOf(c device.Condition) time.Duration {
	if keepsAway(c) {
		return 0
	}
	return 10 * time.Minute
}

// isInTrouble reports whether a GPU has a condition like one that is over, or does not work for another reason.
func isInTrouble(was device.Condition, now []device.Condition) bool {
	return slices.ContainsFunc(now, func(is device.Condition) bool {
		return is.PCIAddress == was.PCIAddress && (is.Reason == was.Reason || slices.Contains(failures, is.Reason))
	})
}

// recovery says that a condition is over.
func recovery(c device.Condition) events.Event {
	offered := ""
	if keepsAway(c) {
		offered = "Devices are offered again"
	}
	return events.Event{
		Type: corev1.EventTypeNormal, Reason: recoveryReason(c.Reason), Subjects: []string{c.PCIAddress},
		Text: sentences(overText(c.Reason), offered),
	}
}

// reasonStaticPartitions is the reason of an event.
const reasonStaticPartitions = "GPUPartitionsOfOthers"

// sayStatics says which partitions somebody else has made. They are nothing to repair, and may be there on purpose.
func (s *conditionSpeaker) sayStatics(ctx context.Context, all []device.Static) {
	byGPU := map[string][]string{}
	for _, one := range all {
		if !one.Gone {
			byGPU[one.PCIAddress] = append(byGPU[one.PCIAddress], one.UUID)
		}
	}
	var statements []events.Statement
	for address, uuids := range byGPU {
		slices.Sort(uuids)
		text := "partitions that were not made by this driver are offered as they are, and nothing that overlaps them: " + strings.Join(uuids, ", ")
		statements = append(statements, events.Statement{Key: address + text, Event: events.Event{
			Type: corev1.EventTypeNormal, Reason: reasonStaticPartitions, Subjects: []string{address}, Text: text,
		}})
	}
	s.board.Say(ctx, "partitions of others", statements, nil)
}

// failures are the reasons for which nothing works on a GPU.
var failures = []device.Reason{device.Lost, device.ResetRequired, device.Unresponsive}

// alarms are the reasons of conditions that users of GPUs do not cause by what MPS makes of their programs.
var alarms = slices.Concat(failures, []device.Reason{
	device.RecoveryRequired, device.XID, device.UncorrectedECC, device.RowRemapFailed, device.MemoryUnrepairable, device.FabricUnhealthy,
})

// NewEvents makes what tells people, until ctx ends, with a client for events of the node and one for those of its users.
func NewEvents(ctx context.Context, node, users kubernetes.Interface, component, nodeName string) *events.Recorder {
	o := events.Options{Component: component, NodeName: nodeName, Node: node, Users: users, Claim: NewCluster(users).Claim}
	for _, reason := range alarms {
		o.Alarms = append(o.Alarms, eventReason(reason), recoveryReason(reason))
	}
	return events.New(ctx, o)
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
