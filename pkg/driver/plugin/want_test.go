// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
)

// everything is known at a time, and something is wrong wherever that is possible.
func everything(now time.Time) *observedState {
	ref := claim.Ref{Namespace: "n", Name: "c", UID: "u"}
	o := surveyed(device.Status{
		Static:     []device.Static{{PCIAddress: firstGPU, UUID: "MIG-1"}},
		Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Lost, Message: "it fell off"}},
	}, []claim.LiveClaim{uses(ref, firstName, firstGPU, nil)})
	o.node, o.now, o.policyErr = nodeOf("v1.35.9"), now, errors.New("odd")
	o.node.Annotations = map[string]string{api.CordonAnnotation: secondGPU + " gpu-1"}
	o.neighbours = neighbours{
		software: map[unclaimed.Kind]unclaimed.Finding{unclaimed.DevicePlugin: {Kind: unclaimed.DevicePlugin, There: true, Text: "it is there"}},
		claims:   []unclaimed.Claim{{Namespace: "n", Name: "c", Devices: []string{"gpu-1"}}},
	}
	o.gpus.node.GPUs[1].Minor = 1
	o.gpus.discovered, o.gpus.unlisted = true, []string{"0000:ff:00.0"}
	o.health = []device.Condition{{PCIAddress: secondGPU, Reason: device.Throttled, Message: "hot"}}
	o.statements = []claim.Statement{{Claim: ref, Reason: claim.ReasonOrphanInUse, Text: "kept"}}
	return o
}

// TestWantIsPure: a process that has just started wants the same as one that has said it before, and asking changes nothing.
func TestWantIsPure(t *testing.T) {
	t.Parallel()
	now := time.Unix(1, 0)
	o, untouched := everything(now), everything(now)
	first := want(o)
	if !reflect.DeepEqual(o.survey, untouched.survey) || !reflect.DeepEqual(o.live, untouched.live) || !reflect.DeepEqual(o.node, untouched.node) {
		t.Error("what is known is another thing after the question")
	}
	if again := want(o); !reflect.DeepEqual(first.states, again.states) || !reflect.DeepEqual(first.events, again.events) || !reflect.DeepEqual(first.status, again.status) {
		t.Error("the same question has two answers")
	}
	o.previous, o.now = first.states, now.Add(time.Minute)
	if later := want(o); !reflect.DeepEqual(first.states, later.states) || !reflect.DeepEqual(first.events, later.events) {
		t.Errorf("a minute later: %+v and %+v", later.states, later.events)
	}
}

// TestWantHasEverySource: what each source says reaches people, and nothing of GPUs does before enough of them were looked at.
func TestWantHasEverySource(t *testing.T) {
	t.Parallel()
	reasons := func(o *observedState) map[string]bool {
		found := map[string]bool{}
		for _, e := range want(o).events {
			found[e.Reason] = true
		}
		return found
	}
	always := []string{reasonPolicyInvalid, reasonExtendedOff, reasonDevicePlugin, reasonUnlisted, reasonCordonUnknown}
	looked := []string{reasonStaticPartitions, "GPULost", "GPUThrottled", "GPUForeignClaim", "GPUCordoned", claim.ReasonOrphanInUse}
	for _, enough := range []bool{false, true} {
		o := everything(time.Unix(1, 0))
		o.enough = enough
		got := reasons(o)
		for _, reason := range always {
			if !got[reason] {
				t.Errorf("enough %t: no event %s", enough, reason)
			}
		}
		for _, reason := range looked {
			if got[reason] != enough {
				t.Errorf("enough %t: event %s: %t", enough, reason, got[reason])
			}
		}
	}
	w := want(everything(time.Unix(1, 0)))
	if len(w.states) != 1 || w.states[0].devices[0].ready() || len(w.status.Conditions) != 4 || len(w.offered) != 2 {
		t.Errorf("states %+v, conditions %+v, %d GPUs", w.states, w.status.Conditions, len(w.offered))
	}
}
