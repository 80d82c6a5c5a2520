// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

func (b *box) wantInterval(when, uuid string, want policy.Interval) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if got := b.intervals[uuid]; got != want {
		b.t.Errorf("%s: the time slice of %s is %q, want %q", when, uuid, got, want)
	}
}

// turning is a plugin under a policy with this interval for shares.
func (b *box) turning(interval policy.Interval) *Manager {
	b.t.Helper()
	p := testPolicy()
	p.Default.TimeSlice.Interval = interval
	return b.under(device.Terms{Policy: p})
}

// under is a plugin that publishes devices on these terms.
func (b *box) under(terms device.Terms) *Manager {
	b.t.Helper()
	inventory, err := device.NewInventory(testNode(), terms)
	if err != nil {
		b.t.Fatal(err)
	}
	m := b.manager()
	m.SetInventory(inventory)
	return m
}

// The GPU has the time slice that its first share found in the policy, until the
// last one is gone.
func TestIntervalOfFirstShare(t *testing.T) {
	for _, test := range []struct {
		first, later, set policy.Interval
	}{
		{policy.IntervalShort, policy.IntervalShort, policy.IntervalShort},
		{policy.IntervalShort, policy.IntervalLong, policy.IntervalShort},
		{policy.IntervalShort, policy.IntervalDefault, policy.IntervalShort},
		{policy.IntervalDefault, policy.IntervalLong, ""},
	} {
		b := newBox(t)
		mustPrepare(t, b.turning(test.first), newClaim("u1", turnsA))
		m := b.turning(test.later)
		b.hooks(nil, nil)
		for _, uid := range []string{"u2", "u3"} {
			mustPrepare(t, m, newClaim(uid, turnsA))
		}
		if seen := b.onHardware(); len(seen) > 0 {
			t.Errorf("effects of later shares: %v", seen)
		}
		for _, uid := range []types.UID{"u2", "u1", "u3"} {
			b.wantInterval(fmt.Sprintf("%+v", test), "GPU-a", test.set)
			mustUnprepare(t, m, uid)
		}
		b.wantNothing()
	}
}

// TestIntervalBehindUnreadableRecord: who leaves a share to a claim whose record cannot be read keeps the note of the time slice.
func TestIntervalBehindUnreadableRecord(t *testing.T) {
	b := newBox(t)
	dying := b.turning(policy.IntervalShort)
	b.hooks(nil, b.killAt("interval Short"))
	if _, err := dying.Prepare(t.Context(), newClaim("u1", turnsA)); !errors.Is(err, errKilled) {
		t.Fatalf("not killed: %v", err)
	}
	b.hooks(nil, nil)
	m := b.turning(policy.IntervalDefault)
	mustPrepare(t, m, newClaim("u2", turnsA))
	mustPrepare(t, m, newClaim("u3", turnsA))
	damage(t, m, "u3")
	mustUnprepare(t, m, "u1")
	mustPrepare(t, m, newClaim("u3", turnsA))
	mustUnprepare(t, m, "u3")
	mustUnprepare(t, m, "u2")
	_ = m.cleanUp(t.Context())
	b.wantNothing()
}

// What a killed plugin was about to set, or has set, is set back: whatever the
// policy says by then, and whoever has come meanwhile.
func TestIntervalOfKilled(t *testing.T) {
	set := map[policy.Interval]policy.Interval{policy.IntervalDefault: "", policy.IntervalLong: policy.IntervalLong}
	for _, effect := range []string{"write preparing", "interval Short"} {
		for _, later := range []policy.Interval{policy.IntervalDefault, policy.IntervalLong} {
			for name, end := range map[string]func(t *testing.T, b *box, m *Manager){
				"prepare": func(t *testing.T, _ *box, m *Manager) {
					mustPrepare(t, m, newClaim("u1", turnsA))
					mustUnprepare(t, m, "u1")
				},
				"prepare another": func(t *testing.T, b *box, m *Manager) {
					mustPrepare(t, m, newClaim("u2", turnsA))
					mustReconcile(t, m)
					b.wantInterval("the second alone", "GPU-a", set[later])
					mustUnprepare(t, m, "u2")
				},
				"prepare and unprepare another": func(t *testing.T, _ *box, m *Manager) {
					mustPrepare(t, m, newClaim("u2", turnsA)) // it takes with it what the first has left
					mustUnprepare(t, m, "u2")
					mustUnprepare(t, m, "u1")
				},
				"unprepare": func(t *testing.T, _ *box, m *Manager) { mustUnprepare(t, m, "u1") },
				"reconcile": func(t *testing.T, _ *box, m *Manager) { mustReconcile(t, m) },
			} {
				b := newBox(t)
				dying := b.turning(policy.IntervalShort)
				b.hooks(nil, b.killAt(effect))
				if _, err := dying.Prepare(t.Context(), newClaim("u1", turnsA)); !errors.Is(err, errKilled) {
					t.Fatalf("not killed: %v", err)
				}
				b.hooks(nil, nil)
				end(t, b, b.turning(later))
				if b.wantNothing(); t.Failed() {
					t.Fatalf("killed at %s, then %s with %s", effect, name, later)
				}
			}
		}
	}
}

// One that could not be set back waits for nobody who does not mind.
func TestIntervalLeft(t *testing.T) {
	for _, test := range []struct{ later, want policy.Interval }{
		{policy.IntervalDefault, ""},
		{policy.IntervalLong, policy.IntervalLong},
	} {
		b := newBox(t)
		m := b.turning(policy.IntervalShort)
		mustPrepare(t, m, newClaim("u1", turnsA))
		b.hooks(failAt("interval Default"), nil)
		mustUnprepare(t, m, "u1")
		b.hooks(nil, nil)
		m = b.turning(test.later)
		mustPrepare(t, m, newClaim("u2", turnsA))
		mustReconcile(t, m)
		b.wantInterval("the second", "GPU-a", test.want)
		mustUnprepare(t, m, "u2")
		b.wantNothing()
	}
}

// A time slice that is refused leaves nothing. What somebody has set by hand on the GPU is the driver's by then.
func TestIntervalNotSet(t *testing.T) {
	for _, refusal := range []error{gpu.ErrNoPermission, gpu.ErrNotSupported, gpu.ErrInvalid, fmt.Errorf("no nvidia-smi: %w", fs.ErrNotExist)} {
		b := newBox(t)
		m := b.manager()
		b.intervals["GPU-a"], b.intervals["GPU-c"] = policy.IntervalMedium, policy.IntervalMedium
		b.hooks(func(e string) error {
			if e == "interval Short" {
				return refusal
			}
			return nil
		}, nil)
		_, err := m.Prepare(t.Context(), newClaim("u1", turnsC))
		if !errors.Is(err, refusal) {
			t.Errorf("got %v", err)
		}
		wantError(t, err, "device "+turnsC)
		b.hooks(nil, nil)
		b.wantInterval("of another GPU", "GPU-a", policy.IntervalMedium)
		if left := m.claims(); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// Pods end without the driver and its programs.
func TestIntervalWithoutProgram(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", turnsC))
	b.hooks(func(e string) error {
		if e == "interval Default" {
			return fmt.Errorf("no nvidia-smi: %w", fs.ErrNotExist)
		}
		return nil
	}, nil)
	mustUnprepare(t, m, "u1")
	wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1", "no nvidia-smi")
	b.hooks(nil, nil)
	mustReconcile(t, m)
	b.wantNothing()
}

// A claim that owns GPUs sets them all, and no others.
func TestOwnInterval(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.intervals["GPU-b"] = policy.IntervalShort
	before := b.state()
	claim := configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuLong)
	mustPrepare(t, m, claim)
	mustPrepare(t, m, newClaim("u2", wholeB))
	for uuid, want := range map[string]policy.Interval{"GPU-a": policy.IntervalLong, "GPU-b": policy.IntervalShort, "GPU-c": policy.IntervalLong} {
		b.wantInterval("prepared", uuid, want)
	}
	mustUnprepare(t, m, "u1")
	mustUnprepare(t, m, "u2")
	b.wantState(t, "released", before)
}

// TestLimitsComeLater: claims for turns of which the scheduler counted nothing, because nothing limited such
// shares, stay as they are when the operator names an interposer library: prepared again, and after a
// reboot. They are not limited, and claims that come then are.
func TestLimitsComeLater(t *testing.T) {
	b := newBox(t)
	old := newShare("u1", turnsA, map[resourceapi.QualifiedName]string{"shares": "1", "memory": "0", "smPercent": "0", "multiprocessors": "0"})
	mustPrepare(t, b.under(device.Terms{Policy: testPolicy()}), old)
	limiting := device.Terms{Policy: testPolicy(), Limited: true}
	m := b.under(limiting)
	mustPrepare(t, m, old)
	b.boot("boot-2")
	m = b.under(limiting)
	mustPrepare(t, m, old)
	mustPrepare(t, m, newShare("u2", turnsA, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "25"}))
	for uid, limited := range map[types.UID]bool{"u1": false, "u2": true} {
		if got := liveOf(t, m, string(uid)).Limits != nil; got != limited {
			t.Errorf("claim %s is limited: %t, want %t", uid, got, limited)
		}
		mustUnprepare(t, m, uid)
	}
	b.wantNothing()
}
