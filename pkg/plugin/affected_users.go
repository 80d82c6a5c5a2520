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

// ClaimHolder knows which claims use which devices.
type ClaimHolder interface {
	// Held lists the devices of prepared claims.
	Held() ([]claim.HeldDevice, error)
}

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

func (u *affectedUsers) report(ctx context.Context, events EventWriter, claims ClaimHolder, conditions []device.Condition) {
	conditions = slices.DeleteFunc(slices.Clone(conditions), func(c device.Condition) bool { return conditionTexts[c.Reason].users == "" })
	if len(conditions) == 0 && len(u.reported) == 0 {
		return
	}
	held, err := claims.Held()
	u.problem.Log(ctx, err, "Conditions of devices cannot be reported to their users", "Conditions of devices are reported to their users again")
	if err != nil {
		return
	}
	now, affected := time.Now(), affectedBy(conditions, held)
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
	claimEvents = append(claimEvents, u.recovered(affected, held)...)
	u.reported = affected.claims
	events.ClaimEvents(ctx, claimEvents)
}

// recovered are the events about the devices for which a condition is over, if the claims still
// have them and there is no other condition.
func (u *affectedUsers) recovered(now affected, held []claim.HeldDevice) []ClaimEvent {
	var claimEvents []ClaimEvent
	for key, was := range u.reported {
		over := was.devices
		for other, is := range now.claims {
			if other.claim == key.claim {
				over = without(over, is.devices)
			}
		}
		still := slices.DeleteFunc(slices.Clone(over), func(name string) bool {
			return !slices.ContainsFunc(held, func(h claim.HeldDevice) bool { return h.Claim == key.claim && h.Device == name })
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

func affectedBy(conditions []device.Condition, held []claim.HeldDevice) affected {
	all := affected{claims: map[affectedClaim]*userReport{}}
	for _, h := range held {
		for _, c := range conditions {
			if !concerns(c, h) {
				continue
			}
			key := affectedClaim{h.Claim, c.Reason}
			one := all.claims[key]
			if one == nil {
				one = &userReport{text: usersText(c)}
				all.claims[key] = one
				all.order = append(all.order, key)
			}
			if !slices.Contains(one.devices, h.Device) {
				one.devices = append(one.devices, h.Device)
			}
		}
	}
	return all
}

// concerns reports whether a condition holds for a device that a claim has.
func concerns(c device.Condition, h claim.HeldDevice) bool {
	switch {
	case c.PCIAddress != h.PCIAddress:
		return false
	case c.Kind == device.MPS && !h.MPS:
		return false
	case c.Where == nil:
		return true
	case c.Exact:
		return h.Placement != nil && *h.Placement == *c.Where
	}
	return h.Placement == nil || h.Placement.Overlaps(*c.Where)
}
