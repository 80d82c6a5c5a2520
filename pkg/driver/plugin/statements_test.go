// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
)

// speakingClaims say something.
type speakingClaims struct {
	*fakeClaims
	said []claim.Statement
}

func (c *speakingClaims) Statements() []claim.Statement { return c.said }

// TestOrphanInUseIsToldOnce: its processes come and go, which is no news.
func TestOrphanInUseIsToldOnce(t *testing.T) {
	t.Parallel()
	told := &fakeEvents{}
	c := &speakingClaims{fakeClaims: &fakeClaims{}}
	notifier := events.NewNotifier(told.Tell)
	for pid := range 20 {
		c.said = []claim.Statement{{
			Claim: claim.Ref{Namespace: "n", Name: "c", UID: "u"}, Reason: claim.ReasonOrphanInUse,
			Text: fmt.Sprintf("kept, because processes use gpu-0: process %d (python)", 4711+pid),
		}}
		notifier.Set(t.Context(), "node", claimStatements(c.Statements()), nil)
	}
	if got := len(told.list()); got != 1 {
		t.Errorf("%d events", got)
	}
}

// TestRepeatedTogether: what began as one event is repeated as one.
func TestRepeatedTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		told := &fakeEvents{}
		notifier := events.NewNotifier(told.Tell)
		var all []events.Statement
		for i := range 16 {
			all = append(all, events.Statement{Key: i, Event: events.Event{Reason: "GPUUnresponsive", Subjects: []string{fmt.Sprint("gpu", i)}, Text: "no driver"}})
		}
		notifier.Set(t.Context(), "x", all, nil)
		first := len(told.list())
		time.Sleep(55 * time.Minute)
		notifier.Set(t.Context(), "x", all, nil)
		if again := len(told.list()) - first; first != 1 || again != 1 {
			t.Errorf("%d events, repeated as %d", first, again)
		}
	})
}

// TestUsersAreToldOfEachEnd: MPS accepts processes again while the GPU is slow.
func TestUsersAreToldOfEachEnd(t *testing.T) {
	t.Parallel()
	told := &fakeEvents{}
	claims := &fakeClaims{}
	ref := claim.Ref{Namespace: "n", Name: "c", UID: "u"}
	live := uses(ref, "gpu-0-mps", firstGPU, nil)
	live.Devices[0].Session = &claim.LiveSession{}
	claims.setLive(live)
	s := newSpeaker(told, claims)
	mps := device.Condition{PCIAddress: firstGPU, Reason: device.MPSUnhealthy, Kind: device.MPS, Message: "m"}
	slow := device.Condition{PCIAddress: firstGPU, Reason: device.Throttled, Message: "hot"}
	for _, c := range [][]device.Condition{{mps, slow}, {slow}, nil} {
		s.say(t.Context(), device.Status{Conditions: c})
	}
	users := 0
	for _, e := range told.list() {
		if strings.HasPrefix(e, "c: MPSRecovered") {
			users++
		}
	}
	if users != 1 {
		t.Errorf("MPSUnhealthy was told, and its end %d times: %q", users, told.list())
	}
}

// TestEvictionByPolicyIsTold: a condition gets another effect.
func TestEvictionByPolicyIsTold(t *testing.T) {
	t.Parallel()
	told := &fakeEvents{}
	s := newSpeaker(told, &fakeClaims{})
	c := device.Condition{PCIAddress: firstGPU, Reason: device.Throttled, Message: "hot"}
	s.say(t.Context(), device.Status{Conditions: []device.Condition{c}})
	c.Effect = "NoExecute"
	s.say(t.Context(), device.Status{Conditions: []device.Condition{c}})
	if got := told.list(); !strings.Contains(strings.Join(got, "\n"), "evicted") {
		t.Errorf("%q", got)
	}
}
