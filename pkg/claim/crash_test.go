// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// The tests here find out by themselves which effects a call has, so that a new
// one is covered without anyone remembering it.

// layouts are the claims that are broken at every point. Other claims are there
// before, and must not notice.
var layouts = map[string]struct {
	beside, claim []string
}{
	"whole":                {claim: []string{wholeA}},
	"whole without MIG":    {claim: []string{wholeC}},
	"partition with mode":  {claim: []string{sliceA0}},
	"second on the GPU":    {beside: []string{halfA4}, claim: []string{sliceA0}},
	"several on two GPUs":  {claim: []string{sliceA0, sliceA4, sliceB0, wholeC}},
	"beside, on two GPUs":  {beside: []string{halfA4, sliceB0}, claim: []string{sliceA0, wholeC}},
	"whole beside another": {beside: []string{wholeA}, claim: []string{wholeB}},
}

// scene is a machine with the claims that are beside.
func scene(t *testing.T, beside []string) (*box, []string) {
	t.Helper()
	b := newBox(t)
	if len(beside) > 0 {
		mustPrepare(t, b.manager(), newClaim("beside", beside...))
	}
	return b, b.state()
}

// wantState fails unless exactly this is there.
func (b *box) wantState(t *testing.T, when string, want []string) {
	t.Helper()
	if got := b.state(); !slices.Equal(got, want) {
		t.Errorf("%s: left\n%q, want\n%q", when, got, want)
	}
}

// at makes a hook that acts on the nth effect.
func at(n int, act func() error) func(string) error {
	count := 0
	return func(string) error {
		count++
		if count == n {
			return act()
		}
		return nil
	}
}

// operations are what is broken.
var operations = map[string]struct {
	prepared bool // the claim is prepared before
	run      func(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) error
}{
	"prepare": {false, func(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) error {
		_, err := m.Prepare(t.Context(), claim)
		return err
	}},
	"unprepare": {true, func(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) error {
		return m.Unprepare(t.Context(), claim.UID)
	}},
	"prepare again": {true, func(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) error {
		_, err := m.Prepare(t.Context(), claim)
		return err
	}},
}

// TestKilled kills the plugin before and after every effect of every operation
// on every layout, and continues in every way.
func TestKilled(t *testing.T) {
	continuations := map[string]func(t *testing.T, b *box, claim *resourceapi.ResourceClaim){
		"prepare": func(t *testing.T, b *box, claim *resourceapi.ResourceClaim) {
			mustPrepare(t, b.manager(), claim)
			mustUnprepare(t, b.manager(), claim.UID)
		},
		"unprepare": func(t *testing.T, b *box, claim *resourceapi.ResourceClaim) {
			mustUnprepare(t, b.bareManager(), claim.UID)
		},
		"resume, then prepare": func(t *testing.T, b *box, claim *resourceapi.ResourceClaim) {
			m := b.manager()
			if err := m.Resume(t.Context()); err != nil {
				t.Error(err)
			}
			mustPrepare(t, m, claim)
			mustUnprepare(t, m, claim.UID)
		},
		"resume, then unprepare": func(t *testing.T, b *box, claim *resourceapi.ResourceClaim) {
			m := b.manager()
			if err := m.Resume(t.Context()); err != nil {
				t.Error(err)
			}
			mustUnprepare(t, m, claim.UID)
		},
		"reboot, then prepare": func(t *testing.T, b *box, claim *resourceapi.ResourceClaim) {
			b.boot("boot-2")
			mustPrepare(t, b.manager(), newClaim("beside-2", sliceA1))
			mustUnprepare(t, b.manager(), "beside-2")
			mustPrepare(t, b.manager(), claim)
			mustUnprepare(t, b.manager(), claim.UID)
		},
	}
	cases := 0
	for layout, l := range layouts {
		for operation, op := range operations {
			for continuation, proceed := range continuations {
				for _, after := range []bool{false, true} {
					for n := 1; ; n++ {
						b, want := scene(t, l.beside)
						claim := newClaim("u1", l.claim...)
						if op.prepared {
							mustPrepare(t, b.manager(), claim)
						}
						die := at(n, func() error { panic(killed{}) })
						if after {
							b.hooks(nil, die)
						} else {
							b.hooks(die, nil)
						}
						m := b.manager()
						if !kill(func() { _ = op.run(t, m, claim) }) {
							break
						}
						cases++
						b.hooks(nil, nil)
						when := fmt.Sprintf("%s, %s killed at effect %d (after: %v), then %s", layout, operation, n, after, continuation)
						proceed(t, b, claim)
						if continuation == "reboot, then prepare" {
							mustUnprepare(t, b.manager(), "beside")
							want = nil
						}
						b.wantState(t, when, want)
						if t.Failed() {
							t.Fatal(when)
						}
					}
				}
			}
		}
	}
	t.Logf("%d cases", cases)
}

// TestFault makes every effect of every operation fail once: instead of
// happening, or after it has happened.
func TestFault(t *testing.T) {
	cases := 0
	for layout, l := range layouts {
		for operation, op := range operations {
			for _, after := range []bool{false, true} {
				for n := 1; ; n++ {
					b, want := scene(t, l.beside)
					claim := newClaim("u1", l.claim...)
					if op.prepared {
						mustPrepare(t, b.manager(), claim)
					}
					struck := false
					fail := at(n, func() error { struck = true; return errFault })
					if after {
						b.hooks(nil, fail)
					} else {
						b.hooks(fail, nil)
					}
					m := b.manager()
					err := op.run(t, m, claim)
					if !struck {
						break
					}
					cases++
					when := fmt.Sprintf("%s, %s fails at effect %d (after: %v)", layout, operation, n, after)
					b.hooks(nil, nil)
					if err == nil {
						t.Errorf("%s: no error", when)
					}
					if operation == "prepare" {
						b.wantState(t, when, want)
					}
					// Once the fault is gone, all is well without a new process.
					if err := op.run(t, m, claim); err != nil {
						t.Errorf("%s: once it is gone: %v", when, err)
					}
					mustUnprepare(t, m, claim.UID)
					b.wantState(t, when, want)
					if t.Failed() {
						t.Fatal(when)
					}
				}
			}
		}
	}
	t.Logf("%d cases", cases)
}

// TestFaultPersists: an effect fails and so does everything after it, undoing
// included. Resume cleans up later.
func TestFaultPersists(t *testing.T) {
	cases := 0
	for layout, l := range layouts {
		for n := 1; ; n++ {
			b, want := scene(t, l.beside)
			claim := newClaim("u1", l.claim...)
			count := 0
			b.hooks(func(string) error {
				if count++; count >= n {
					return errFault
				}
				return nil
			}, nil)
			m := b.manager()
			_, err := m.Prepare(t.Context(), claim)
			if err == nil {
				break
			}
			cases++
			when := fmt.Sprintf("%s, everything fails from effect %d on", layout, n)
			b.hooks(nil, nil)
			if err := m.Resume(t.Context()); err != nil {
				t.Errorf("%s: %v", when, err)
			}
			b.wantState(t, when, want)
			mustPrepare(t, m, claim)
			mustUnprepare(t, m, claim.UID)
			b.wantState(t, when, want)
			if t.Failed() {
				t.Fatal(when)
			}
		}
	}
	t.Logf("%d cases", cases)
}
