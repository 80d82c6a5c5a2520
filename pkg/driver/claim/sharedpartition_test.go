// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
)

// The partition comes with the first share and goes with the last, and its records
// all name the same.
func TestSharesOfPartition(t *testing.T) {
	for _, device := range []string{mpsSliceA0, turnSliceA0} {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("beside", sliceA4))
		before := b.state()
		for _, uid := range []string{"u1", "u2", "u3"} {
			mustPrepare(t, m, newClaim(uid, device))
		}
		live, _ := b.look(addressA0)
		for _, uid := range []types.UID{"u1", "u2", "u3"} {
			if r, err := m.store.Read(uid); err != nil || *r.Devices[0].Partition.Made != live {
				t.Errorf("%s says %+v (%v), live is %+v", uid, r, err, live)
			}
		}
		if findings := findings(survey(t.Context(), m)); len(findings) > 0 {
			t.Errorf("survey: %v", findings)
		}
		for _, uid := range []types.UID{"u1", "u3"} {
			mustUnprepare(t, m, uid)
			if now, found := b.look(addressA0); !found || now != live {
				t.Errorf("without %s the partition is %+v, %v", uid, now, found)
			}
		}
		mustUnprepare(t, m, "u2")
		b.wantState(t, "the last is gone", before)
	}
}

// Somebody removes the partition under its shares.
func TestSharedPartitionGone(t *testing.T) {
	for _, device := range []string{mpsSliceA0, turnSliceA0} {
		runInBubble(t, device, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", device))
			mustPrepare(t, m, newClaim("u2", device))
			b.removeForeign(addressA0)
			for _, uid := range []string{"u3", "u1"} {
				_, err := m.Prepare(t.Context(), newClaim(uid, device))
				wantError(t, err, "device "+device, "claim default/claim-u", "has lost its share")
			}
			if now, found := b.look(addressA0); found {
				t.Errorf("%s: made %+v", device, now)
			}
			survey(t.Context(), m)
			wantError(t, m.cleanUp(t.Context()), "device "+device, "was removed by somebody else")
			for _, uid := range []string{"u1", "u2"} {
				if !slices.ContainsFunc(m.Statements(), func(s Statement) bool { return string(s.Claim.UID) == uid && s.Reason == ReasonPartitionGone }) {
					t.Errorf("nothing is said of claim %s: %+v", uid, m.Statements())
				}
			}
			if b.spec("u1") != nil || b.spec("u2") != nil {
				t.Error("a claim without its partition has a CDI spec")
			}
			// The last one has it again, as one that has a partition alone.
			mustUnprepare(t, m, "u2")
			for _, uid := range []string{"u1", "u3"} {
				mustPrepare(t, m, newClaim(uid, device))
			}
			mustUnprepare(t, m, "u3")
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}

// A partition without any record is not shared.
func TestShareOfForeignPartition(t *testing.T) {
	b := newBox(t)
	b.makeForeign(addressA0)
	before := b.state()
	m := b.manager()
	m.SetInventory(testInventory(t)) // from before it was made
	for _, device := range []string{mpsSliceA0, turnSliceA0} {
		_, err := m.Prepare(t.Context(), newClaim("u1", device))
		wantError(t, err, "device "+device, "was not made by this driver")
		b.wantState(t, "refused", before)
	}
}

// What a release could not remove is there for the next share.
func TestShareOfLeftPartition(t *testing.T) {
	for _, device := range []string{mpsSliceA0, turnSliceA0} {
		runInBubble(t, device, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", device))
			live, _ := b.look(addressA0)
			b.run(pciA, gpu.Process{PID: 77, InstanceID: live.InstanceID})
			mustUnprepare(t, m, "u1") // the pod ends
			if r, err := m.store.Read("u1"); err != nil || r == nil || r.State != record.Releasing {
				t.Errorf("got %+v, %v", r, err)
			}
			mustPrepare(t, m, newClaim("u2", device))
			mustReconcile(t, m) // it is the second one's now
			b.run(pciA)
			if now, found := b.look(addressA0); !found || now != live {
				t.Errorf("%s: the partition is %+v, was %+v", device, now, live)
			}
			if r, err := m.store.Read("u1"); r != nil || err != nil {
				t.Errorf("the first has %+v, %v", r, err)
			}
			mustUnprepare(t, m, "u2")
			b.wantNothing()
		})
	}
}

// A partition is gone, and its session cannot be ended before the supervisor is back.
// The session that stays until then is in nobody's way.
func TestPartitionGoneWithoutSupervisor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		claim := newClaim("u1", mpsSliceA0)
		mustPrepare(t, m, claim)
		was, _ := b.look(addressA0)
		b.removeForeign(addressA0)
		b.away(true)
		if _, err := m.Prepare(t.Context(), claim); !errors.Is(err, sharing.ErrNoSupervisor) {
			t.Errorf("without the supervisor: %v", err)
		}
		b.away(false)
		mustPrepare(t, m, claim)
		now, _ := b.look(addressA0)
		if s := b.running(sliceA0); s == nil || now.InstanceID == was.InstanceID || s.Devices[0] != now.UUID {
			t.Errorf("the partition was %+v and is %+v, the session %+v", was, now, s)
		}
		mustUnprepare(t, m, "u1")
		b.wantNothing()
	})
}
