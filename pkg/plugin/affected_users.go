// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/logchange"
)

// affectedUsers reports to the users of claims that something is wrong with their devices, as
// long as it is, and when it is over. The zero value is ready to use.
type affectedUsers struct {
	reported map[affectedClaim]*userReport
	problem  logchange.Problem
}

// affectedClaim is a claim with devices for which a condition holds.
type affectedClaim struct {
	claim  claim.Ref
	reason device.Reason
}

// userReport is what was last reported to the users of a claim.
type userReport struct {
	devices []string
	text    string
	repeat  time.Time
}

func (u *affectedUsers) report(ctx context.Context, events EventWriter, claims ClaimViewer, conditions []device.Condition) {
	conditions = slices.DeleteFunc(slices.Clone(conditions), func(c device.Condition) bool { return conditionTexts[c.Reason].users == "" })
	if len(conditions) == 0 && len(u.reported) == 0 {
		return
	}
	live, err := claims.Live()
	u.problem.Log(ctx, err, "Conditions of devices cannot be reported to their users", "Conditions of devices are reported to their users again")
	if err != nil {
		return
	}
	now, affected := time.Now(), affectedBy(conditions, live)
	var claimEvents []ClaimEvent
	for _, key := range affected.order {
		is := affected.claims[key]
		was := u.reported[key]
		if was != nil && len(without(is.devices, was.devices)) == 0 && now.Before(was.repeat) {
			is.repeat = was.repeat
			continue
		}
		is.repeat = repeatAt(now)
		klog.FromContext(ctx).V(2).Info("A claim has devices with a condition", "claim", key.claim, "reason", key.reason, "devices", is.devices)
		claimEvents = append(claimEvents, ClaimEvent{
			Claim: key.claim, Type: corev1.EventTypeWarning, Reason: eventReason(key.reason), Devices: is.devices, Text: is.text,
		})
	}
	claimEvents = append(claimEvents, u.recovered(affected, live)...)
	u.reported = affected.claims
	events.ClaimEvents(ctx, claimEvents)
}

// recovered are the events about the devices for which a condition is over, if the claims still
// have them and there is no other condition.
func (u *affectedUsers) recovered(now affected, live []claim.LiveClaim) []ClaimEvent {
	var claimEvents []ClaimEvent
	for key, was := range u.reported {
		over := was.devices
		for other, is := range now.claims {
			if other.claim == key.claim {
				over = without(over, is.devices)
			}
		}
		still := slices.DeleteFunc(slices.Clone(over), func(name string) bool {
			return !slices.ContainsFunc(live, func(c claim.LiveClaim) bool {
				return c.Claim == key.claim && slices.ContainsFunc(c.Devices, func(d claim.LiveDevice) bool { return d.Device == name && !d.Admin })
			})
		})
		if len(still) > 0 {
			claimEvents = append(claimEvents, ClaimEvent{
				Claim: key.claim, Type: corev1.EventTypeNormal, Reason: recoveryReason(key.reason), Devices: still,
				Text: sentences(overText(key.reason), "Processes that have failed must be restarted"),
			})
		}
	}
	slices.SortFunc(claimEvents, func(a, b ClaimEvent) int {
		return strings.Compare(a.Claim.String()+a.Reason, b.Claim.String()+b.Reason)
	})
	return claimEvents
}

// without returns the names that are not among others.
func without(names, others []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(others, name) })
}

// affected are claims in the order in which their devices are listed.
type affected struct {
	claims map[affectedClaim]*userReport
	order  []affectedClaim
}

func affectedBy(conditions []device.Condition, live []claim.LiveClaim) affected {
	all := affected{claims: map[affectedClaim]*userReport{}}
	for _, l := range live {
		for i := range l.Devices {
			for _, c := range conditions {
				if concerns(c, &l.Devices[i]) {
					all.add(l.Claim, l.Devices[i].Device, c)
				}
			}
		}
	}
	return all
}

func (all *affected) add(ref claim.Ref, name string, c device.Condition) {
	key := affectedClaim{ref, c.Reason}
	one := all.claims[key]
	if one == nil {
		one = &userReport{text: usersText(c)}
		all.claims[key] = one
		all.order = append(all.order, key)
	}
	if !slices.Contains(one.devices, name) {
		one.devices = append(one.devices, name)
	}
}

// concerns reports whether a condition holds for a device that pods of a claim use. A claim
// that only observes a device does not use it.
func concerns(c device.Condition, d *claim.LiveDevice) bool {
	switch {
	case d.Admin || c.PCIAddress != d.PCIAddress:
		return false
	case c.Kind == device.MPS && d.Session == nil, c.Undivided && d.Partition != nil:
		return false
	case c.Where == nil:
		return true
	case c.Exact:
		return d.Partition != nil && d.Partition.Placement == *c.Where
	}
	return d.Partition == nil || d.Partition.Placement.Overlaps(*c.Where)
}
