// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOverlap(t *testing.T) {
	for name, test := range map[string]struct {
		first, second string
		refused       bool
	}{
		"same partition":         {sliceA0, sliceA0, true},
		"placements overlap":     {halfA0, sliceA1, true},
		"partition of the whole": {wholeA, sliceA1, true},
		"whole of a partition":   {sliceA1, wholeA, true},
		"same whole":             {wholeC, wholeC, true},
		"beside":                 {halfA4, sliceA1, false},
		"other GPU":              {wholeA, sliceB0, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("first", test.first))
			before := b.state()
			_, err := b.manager().Prepare(t.Context(), newClaim("second", test.second))
			if !test.refused {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var overlap *OverlapError
			if !errors.As(err, &overlap) || overlap.Other.UID != "first" {
				t.Errorf("got %v", err)
			}
			wantError(t, err, test.second, test.first, "default/claim-first", "prepared")
			if diff := cmp.Diff(before, b.state()); diff != "" {
				t.Errorf("the refusal changed: -before +after:\n%s", diff)
			}
			mustUnprepare(t, m, "first")
			mustPrepare(t, m, newClaim("second", test.second))
			mustUnprepare(t, m, "second")
			b.wantNothing()
		})
	}
}

// What an abandoned claim left is cleared out of the way of the next.
func TestOverlapWithAbandoned(t *testing.T) {
	for _, effect := range []string{"create compute instance", "write prepared"} {
		b := newBox(t)
		b.hooks(nil, killAt(effect))
		if !kill(func() { _, _ = b.manager().Prepare(t.Context(), newClaim("dead", sliceA0)) }) {
			t.Fatal("not killed")
		}
		b.hooks(nil, nil)
		m := b.manager()
		_, err := m.Prepare(t.Context(), newClaim("next", halfA0))
		if effect == "write prepared" {
			wantError(t, err, "default/claim-dead")
			mustUnprepare(t, m, "dead")
			_, err = m.Prepare(t.Context(), newClaim("next", halfA0))
		}
		if err != nil {
			t.Errorf("killed at %q: %v", effect, err)
		}
		mustUnprepare(t, m, "next")
		b.wantNothing()
	}
}

func killAt(effect string) func(string) error {
	return func(e string) error {
		if e == effect {
			panic(killed{})
		}
		return nil
	}
}

func TestOtherDevicesThanBefore(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, newClaim("u1", sliceB0))
	if b.count(pciA) != 0 || b.count(pciB) != 1 {
		t.Errorf("instances: %v", b.state())
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

func TestForeignPartition(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	if _, err := b.Create(t.Context(), addressA0, true); err != nil {
		t.Fatal(err)
	}
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "device "+sliceA0, "was not made by this driver")
	mustUnprepare(t, m, "u1")
	if b.count(pciA) != 1 {
		t.Error("somebody else's partition was destroyed")
	}
	// It is in nobody's way elsewhere, and does not go with ours.
	mustPrepare(t, m, newClaim("u2", sliceA4))
	mustUnprepare(t, m, "u2")
	if b.count(pciA) != 1 {
		t.Error("somebody else's partition was destroyed")
	}
}

func TestAdmin(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	_, err := m.Prepare(t.Context(), admin(newClaim("early", sliceA0)))
	wantError(t, err, sliceA0, "admin access does not make one")
	b.wantNothing()

	mustPrepare(t, m, newClaim("owner", sliceA0))
	b.hooks(nil, nil)
	prepared := mustPrepare(t, m, admin(newClaim("watch", sliceA0, wholeA)))
	if len(prepared) != 2 || !prepared[0].Admin || !prepared[1].Admin {
		t.Errorf("got %+v", prepared)
	}
	if diff := cmp.Diff([]string{"write preparing", "write spec", "write prepared"}, b.effects); diff != "" {
		t.Errorf("effects: -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(b.specs["owner"][0].Nodes, b.specs["watch"][1].Nodes); diff != "" {
		t.Errorf("the observer sees other nodes: %s", diff)
	}
	b.hooks(nil, nil)
	mustUnprepare(t, m, "watch")
	if diff := cmp.Diff([]string{"write unpreparing", "remove spec", "delete record"}, b.effects); diff != "" {
		t.Errorf("effects of unprepare: -want +got:\n%s", diff)
	}
	if b.count(pciA) != 1 {
		t.Error("the observer destroyed what it observed")
	}
	mustUnprepare(t, m, "owner")
	b.wantNothing()
}
