// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// onlyWhole offers the undivided GPU only.
func onlyWhole() *policy.Policy { return &policy.Policy{Default: policy.Offer{Whole: true}} }

// untilPartitionsTainted waits until the partitions of the first GPU have these
// taints, and the whole GPU none.
func partitionsTainted(taint string) map[string][]string {
	all := devicesOf(map[string][]string{firstGPU: {taint}})
	all[device.GPUName(firstGPU)] = nil
	return all
}

// TestPolicyChanges: what is not offered any more stays and is tainted, and what
// is offered again has no taint. Nobody starts anything anew.
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

// TestPolicyTurnsWrong: the last good one stays in force, and people are told once.
func TestPolicyTurnsWrong(t *testing.T) {
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
	before, _ := r.claims.counts()
	r.until(t, "more looks", func(context.Context) error {
		if now, _ := r.claims.counts(); now < before+5 {
			return errors.New("not yet")
		}
		return nil
	})
	r.untilPublished(t, 4, 1)
	if got := r.events.list(); len(got) != 1 || !strings.HasPrefix(got[0], reasonPolicyInvalid+": rules[0]: odd") {
		t.Errorf("events: %q", got)
	}
}

// TestPolicyWrongAtStart: nothing is offered and the plugin says why it is not
// ready. It serves claims, and goes on when the policy is right.
func TestPolicyWrongAtStart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.policy.set(nil, errors.New("rules[0]: odd"))
	r.claims.setInUse(device.GPUName(firstGPU))
	r.start(t)
	r.until(t, "publication", func(context.Context) error {
		if d, _ := published(r.api.Slices()); d != 1 {
			return errors.New("the device that a claim has is not published")
		}
		return nil
	})
	if err := r.check(t.Context(), "readiness"); err == nil {
		t.Error("ready although nobody knows what to offer")
	}
	r.policy.set(withoutShares(), nil)
	r.untilPublished(t, 4, 1)
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

// TestWithdrawal: a device goes when nobody has wanted it for the time of grace,
// and stays as long as a claim has it.
func TestWithdrawal(t *testing.T) {
	now := time.Unix(0, 0)
	o := offer{grace: time.Minute, now: func() time.Time { return now }, policy: withoutShares()}
	node := testNodeWith(firstGPU)
	build := func() *device.Inventory {
		t.Helper()
		inventory, err := device.NewInventory(node, o.terms())
		if err != nil {
			t.Fatal(err)
		}
		return inventory
	}
	partition := device.GPUName(firstGPU) + "-mig-1g4gb-0"

	inventory := build()
	o.note(inventory, nil)
	o.policy = onlyWhole()
	inventory = build()
	if got := len(inventory.Withdrawn()); got != 3 {
		t.Fatalf("%d devices are withdrawn, want 3", got)
	}
	now = now.Add(59 * time.Second)
	o.note(inventory, []string{partition})
	if o.outdated(inventory, []string{partition}) {
		t.Error("something is to be removed before the time of grace is over")
	}
	now = now.Add(time.Second)
	o.note(inventory, []string{partition})
	if !o.outdated(inventory, []string{partition}) {
		t.Fatal("what nobody wants stays")
	}
	inventory = build()
	if got := inventory.Withdrawn(); len(got) != 1 || got[0] != partition {
		t.Fatalf("withdrawn are %v, want only what a claim has", got)
	}
	now = now.Add(time.Hour)
	o.note(inventory, nil)
	inventory = build()
	if _, found := inventory.Lookup(partition); found {
		t.Error("the device stays for ever")
	}
	// A claim that nobody knew of.
	o.note(inventory, []string{partition})
	if !o.outdated(inventory, []string{partition}) {
		t.Error("a device that a claim has is missing and nobody minds")
	}
}
