// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/events"
)

// userKey identifies what the users of a claim are told of a device.
type userKey struct {
	claim  types.UID
	device string
	reason device.Reason
}

// sayToUsers says to the users of claims what is wrong with their devices, and when nothing is any more. What was said stays
// while it is not known which claims there are.
func (s *conditionSpeaker) sayToUsers(ctx context.Context, conditions []device.Condition) {
	live, err := s.claims.Live()
	s.problem.Log(ctx, err, "Conditions of devices cannot be reported to their users", "Conditions of devices are reported to their users again")
	if err != nil {
		return
	}
	type used struct {
		claim  types.UID
		device string
	}
	inUse, now := map[used]bool{}, map[used][]device.Reason{}
	var statements []events.Statement
	for _, l := range live {
		for i := range l.Devices {
			d := &l.Devices[i]
			inUse[used{l.Claim.UID, d.Device}] = !d.Admin
			for _, c := range conditions {
				if d.Admin || conditionTexts[c.Reason].users == "" || !concerns(c, d) {
					continue
				}
				of := used{l.Claim.UID, d.Device}
				now[of] = append(now[of], c.Reason)
				statements = append(statements, events.Statement{Key: userKey{l.Claim.UID, d.Device, c.Reason}, Calm: calmOf(c), Event: events.Event{
					Claim: l.Claim, Reason: eventReason(c.Reason), Subjects: []string{d.Device}, Text: usersText(c),
				}})
			}
		}
	}
	s.board.Say(ctx, "conditions for users", statements, func(was events.Statement) (events.Event, bool) {
		key, _ := was.Key.(userKey)
		of := used{key.claim, key.device}
		return events.Event{
			Claim: was.Claim, Type: corev1.EventTypeNormal, Reason: recoveryReason(key.reason), Subjects: was.Subjects,
			Text: sentences(overText(key.reason), "Processes that have failed must be restarted"),
		}, inUse[of] && !slices.ContainsFunc(now[of], func(is device.Reason) bool { return is == key.reason || slices.Contains(failures, is) })
	})
}

// concerns reports whether a condition holds for a device that a claim has. An observer uses no part of its GPU, so that
// conditions of a part do not concern it.
func concerns(c device.Condition, d *claim.LiveDevice) bool {
	switch {
	case c.PCIAddress != d.PCIAddress:
		return false
	case c.Kind == device.MPS && d.Session == nil, c.Undivided && d.Partition != nil:
		return false
	case c.Where == nil:
		return true
	case c.Exact:
		return d.Partition != nil && d.Partition.Placement == *c.Where
	}
	return d.Partition == nil && !d.Admin || d.Partition != nil && d.Partition.Placement.Overlaps(*c.Where)
}
