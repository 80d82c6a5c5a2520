// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// onlyWhole offers the undivided GPU only.
func onlyWhole() *policy.Policy { return &policy.Policy{Default: policy.Offer{Whole: true}} }

// partitionsTainted are the devices of the first GPU when the partitions have a taint
// and the whole GPU has none.
func partitionsTainted(taint string) map[string][]string {
	all := devicesOf(map[string][]string{firstGPU: {taint}})
	all[device.GPUName(firstGPU)] = nil
	return all
}

// TestPolicyChanges: a device that is not offered any more stays and is tainted, and
// one that is offered again has no taint. Nothing is restarted.
func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil}))
	r.policy.set(onlyWhole(), nil)
	r.untilTainted(t, partitionsTainted("withdrawn"))
	r.policy.set(withoutShares(), nil)
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil}))
}

// TestPolicyTurnsInvalid: the last valid one stays in force, and there is one event.
func TestPolicyTurnsInvalid(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.policy.set(nil, errors.New("rules[0]: odd"))
	r.until(t, "an event", func(context.Context) error {
		if len(r.events.list()) == 0 {
			return errors.New("no event yet")
		}
		return nil
	})
	before := r.claims.rounds()
	r.until(t, "more surveys", func(context.Context) error {
		if now := r.claims.rounds(); now < before+5 {
			return errors.New("not yet")
		}
		return nil
	})
	r.untilPublished(t, 4, 1)
	if got := r.events.list(); len(got) != 1 || !strings.HasPrefix(got[0], reasonPolicyInvalid+": rules[0]: odd") {
		t.Errorf("events: %q", got)
	}
}

// TestPolicyWithUnknownProfiles: one event for the node, however often it is looked at.
func TestPolicyWithUnknownProfiles(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.hardware.setNode(testNodeWith(firstGPU, secondGPU))
	r.policy.set(&policy.Policy{Default: policy.Offer{Whole: true, Partition: &policy.PartitionOffer{Profiles: []string{"1g.5gb"}}}}, nil)
	r.start(t)
	r.until(t, "some surveys", func(context.Context) error {
		if now := r.claims.rounds(); now < 10 {
			return errors.New("not yet")
		}
		return nil
	})
	got := r.events.list()
	if len(got) != 1 || !strings.HasPrefix(got[0], reasonUnknownProfiles+": The sharing policy's default names MIG profiles") {
		t.Errorf("events: %q", got)
	}
}

// TestUnknownProfiles are told once, all of them together, at once when the policy says something else, and when none is left.
func TestUnknownProfiles(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.hardware.setNode(testNodeWith(firstGPU, secondGPU))
	offer := func(profile string) policy.Offer {
		return policy.Offer{Whole: true, Partition: &policy.PartitionOffer{Profiles: []string{profile}}}
	}
	naming := func(profile string) *policy.Policy { return &policy.Policy{Default: offer(profile)} }
	told := func(when string, want int, last ...string) {
		t.Helper()
		s.discover()
		s.poll(0)
		got := s.events.list()
		if len(got) != want {
			t.Fatalf("%s: %d events, want %d: %q", when, len(got), want, got)
		}
		for _, text := range last {
			if !strings.Contains(got[want-1], text) {
				t.Errorf("%s: %q, want %q", when, got[want-1], text)
			}
		}
	}
	s.policy.set(naming("1g.5gb"), nil)
	told("at first", 1, reasonUnknownProfiles, "1g.5gb.")
	told("again", 1)
	s.policy.set(naming("1g.6gb"), nil)
	told("with another mistake", 2, reasonUnknownProfiles, "1g.6gb.")
	first := naming("1g.6gb")
	first.Rules = []policy.Rule{{Name: "first", Match: policy.Match{UUID: "GPU-" + firstGPU}, Offer: offer("1g.7gb")}}
	s.policy.set(first, nil)
	told("with two mistakes", 3, reasonUnknownProfiles, "1g.6gb.", "1g.7gb.")
	s.policy.set(naming("1g.6gb"), nil)
	told("with one of them", 4, reasonUnknownProfiles, "1g.6gb.")
	s.policy.set(nil, errors.New("odd"))
	told("with one that is invalid", 5, reasonPolicyInvalid)
	s.policy.set(onlyWhole(), nil)
	told("without them", 7, "")
	if got := strings.Join(s.events.list()[5:], " "); !strings.Contains(got, reasonPolicyValid+": ") || !strings.Contains(got, "SharingPolicyProfilesKnown: ") {
		t.Errorf("the ends: %s", got)
	}
}

// TestPolicyInvalidAtStart: the published devices stay as they are, claims can have
// them, and the plugin says why it is not ready. It goes on when the policy is valid.
func TestPolicyInvalidAtStart(t *testing.T) {
	t.Parallel()
	before := newRig(t)
	before.start(t)
	before.untilPublished(t, 4, 1)
	before.stop()
	before.done <- <-before.done // the clean-up waits for it as well
	published := before.api.Slices()

	r := newRigOn(t, before.api)
	r.policy.set(nil, errors.New("rules[0]: odd"))
	r.start(t)
	r.register(t)
	r.until(t, "some surveys", func(context.Context) error {
		if now := r.claims.rounds(); now < 10 {
			return errors.New("not yet")
		}
		return nil
	})
	if diff := cmp.Diff(published, r.api.Slices()); diff != "" {
		t.Errorf("slices changed without a policy (-before +after):\n%s", diff)
	}
	r.claims.mu.Lock()
	if got := len(r.claims.inventory.Devices()); got != 4 {
		t.Errorf("claims can have %d devices of 4 that are published", got)
	}
	r.claims.mu.Unlock()
	if err := r.check(t.Context(), "readiness"); err == nil {
		t.Error("ready without a policy")
	}
	r.policy.set(onlyWhole(), nil)
	r.untilTainted(t, partitionsTainted("withdrawn"))
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
}

// TestPublishedBefore: the plugin that ran here before has offered something that
// the policy does not offer now. It may be allocated.
func TestPublishedBefore(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.stop()
	r.done <- <-r.done // the clean-up waits for it as well

	next := newRigOn(t, r.api)
	next.policy.set(onlyWhole(), nil)
	next.start(t)
	next.untilTainted(t, partitionsTainted("withdrawn"))
}
