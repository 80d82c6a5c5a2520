// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestReplacedBySomebodyElse: a GPU can be reset without a restart of the machine. What somebody makes in the place of a
// claim's partition, after that was seen to be gone, is not the claim's. Unseen, nobody could tell the two apart.
func TestReplacedBySomebodyElse(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, m *Manager){
		"unprepare": func(*testing.T, *Manager) {},
		"prepare again": func(t *testing.T, m *Manager) {
			if _, err := m.Prepare(t.Context(), newClaim("u1", sliceA0)); err == nil {
				t.Error("the claim gets somebody else's partition")
			}
		},
		"survey": func(t *testing.T, m *Manager) {
			if s := survey(t.Context(), m); len(s.Static) != 1 {
				t.Errorf("the survey does not say that somebody else's partition is there: %+v", s)
			}
			_ = m.cleanUp(t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.removeForeign(addressA0)
			_ = m.cleanUp(t.Context())
			b.makeForeign(addressA0)
			do(t, m)
			mustUnprepare(t, m, "u1")
			if _, found := b.look(addressA0); !found {
				t.Error("somebody else's partition was destroyed")
			}
		})
	}
}

// TestPreparedAgainAfterReset: a partition is gone and was seen to be, and is made again, for its claim or for the next one.
// It has the UUID of the one that is gone, and is not taken for that.
func TestPreparedAgainAfterReset(t *testing.T) {
	for name, next := range map[string]types.UID{"the same claim": "u1", "the next claim": "u2"} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.removeForeign(addressA0)
			survey(t.Context(), m)
			if next != "u1" {
				mustUnprepare(t, m, "u1")
			}
			mustPrepare(t, m, newClaim(string(next), sliceA0))
			err := m.cleanUp(t.Context())
			if b.spec(next) == nil {
				t.Errorf("the claim was just prepared, and its CDI spec is taken away as if its partition were gone: %v", err)
			}
			mustUnprepare(t, m, next)
			b.wantNothing()
		})
	}
}

// TestPartitionGoneIsSaid as long as the claim is there.
func TestPartitionGoneIsSaid(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.wantStatements(m)
	b.removeForeign(addressA0)
	said := []string{"u1 PartitionGone", sliceA0, "delete the pods"}
	b.wantStatements(m, said)
	for range 2 {
		wantError(t, m.cleanUp(t.Context()), "was removed by somebody else")
		b.wantStatements(m, said)
	}
	mustUnprepare(t, m, "u1")
	b.wantStatements(m)
}

// A claim that cannot be prepared as it is leaves nothing to clean up.
func TestRefused(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	unallocated := newClaim("u1")
	unallocated.Status.Allocation = nil
	var refused *RefusedError
	for name, claim := range map[string]*resourceapi.ResourceClaim{
		"not allocated":         unallocated,
		"no such device":        newClaim("u1", "gpu-0000-ff-00-0"),
		"invalid configuration": configure(newClaim("u1", wholeA), fromClaim, "{}"),
	} {
		if _, err := m.Prepare(t.Context(), claim); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.wantNothing()
	// Without an inventory it is not known whether it can.
	if _, err := b.bareManager().Prepare(t.Context(), newClaim("u1", wholeA)); err == nil || errors.As(err, &refused) {
		t.Errorf("without an inventory: %v", err)
	}
}

// TestNumbersOfAnotherPartition: ids of instances are used again, and with them the
// device numbers. Restarted containers get what the spec says without any Prepare.
func TestNumbersOfAnotherPartition(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	reuse := func() {
		b.mu.Lock()
		b.nextID = 7
		b.mu.Unlock()
	}
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.removeForeign(addressA0)
	reuse()
	mustPrepare(t, m, newClaim("u2", sliceA4))
	survey(t.Context(), m)
	wantError(t, m.cleanUp(t.Context()), "device "+sliceA0, "was removed by somebody else")
	if spec := b.spec("u1"); len(spec) > 0 {
		t.Errorf("the claim without a partition has a spec: %v", spec)
	}
	if spec := b.spec("u2"); len(spec) != 1 {
		t.Errorf("the other claim's spec: %v", spec)
	}

	// Prepared again, it has a partition and a spec of its own.
	mustPrepare(t, m, newClaim("u1", sliceA0))
	survey(t.Context(), m)
	if err := m.cleanUp(t.Context()); err != nil {
		t.Error(err)
	}
	one, two := b.spec("u1"), b.spec("u2")
	if len(one) != 1 || slices.Equal(one[0].Nodes, two[0].Nodes) {
		t.Errorf("specs: %v and %v", one, two)
	}
}
