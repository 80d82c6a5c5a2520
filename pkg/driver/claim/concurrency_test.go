// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// GPUs are independent: while a call hangs on one, claims on others come and go,
// and those that need the same GPU wait no longer than they are told to.
func TestGPUsAreIndependent(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	entered, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	b.hooks(func(e string) error {
		if e == "create instance" {
			hang := false
			once.Do(func() { hang = true })
			if hang {
				close(entered)
				<-leave
			}
		}
		return nil
	}, nil)
	done := make(chan error)
	go func() {
		_, err := m.Prepare(t.Context(), newClaim("hangs", sliceA0))
		done <- err
	}()
	<-entered

	for _, other := range []*Manager{m, b.manager()} {
		mustPrepare(t, other, newClaim("free", sliceB0, wholeC))
		mustUnprepare(t, other, "free")
		ctx, cancel := context.WithCancel(t.Context())
		waiting := make(chan error)
		go func() {
			_, err := other.Prepare(ctx, newClaim("waits", sliceA4))
			waiting <- err
		}()
		cancel()
		if err := <-waiting; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	select {
	case err := <-done:
		t.Errorf("the hanging call returned: %v", err)
	default:
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
	mustUnprepare(t, m, "hangs")
	b.wantNothing()
}

// Many claims in two processes at once, on the same GPUs: all are prepared, and
// nothing is left at the end.
func TestManyAtOnce(t *testing.T) {
	b := newBox(t)
	managers := []*Manager{b.manager(), b.manager()}
	var wg sync.WaitGroup
	for i := range 7 {
		start := string(rune('0' + i))
		for g, whole := range []string{wholeA, wholeB} {
			m := managers[(i+g)%2]
			uid := "u" + start + string(rune('a'+g))
			name := whole + "-mig-1g10gb-" + start
			wg.Go(func() {
				for range 3 {
					if _, err := m.Prepare(t.Context(), newClaim(uid, name)); err != nil {
						t.Errorf("prepare: %v", err)
					}
					if err := m.Unprepare(t.Context(), types.UID(uid)); err != nil {
						t.Errorf("unprepare: %v", err)
					}
				}
				if _, err := m.Prepare(t.Context(), newClaim(uid, name)); err != nil {
					t.Errorf("prepare: %v", err)
				}
			})
		}
	}
	wg.Wait()
	if b.count(pciA) != 7 || b.count(pciB) != 7 {
		t.Errorf("not all are there: %v", b.state())
	}
	for i := range 7 {
		for _, g := range []string{"a", "b"} {
			wg.Go(func() {
				if err := managers[0].Unprepare(t.Context(), types.UID("u"+string(rune('0'+i))+g)); err != nil {
					t.Errorf("unprepare: %v", err)
				}
			})
		}
	}
	wg.Wait()
	b.wantNothing()
}

// During an upgrade two processes work in the same folder, and either may get any
// call.
func TestTwoProcesses(t *testing.T) {
	b := newBox(t)
	old := b.manager()
	mustPrepare(t, old, newClaim("u1", sliceA0, wholeC))
	mustPrepare(t, old, newClaim("u2", sliceB0))
	want := b.state()
	next := b.manager()
	b.hooks(nil, nil)
	for _, m := range []*Manager{next, old} {
		mustReconcile(t, m)
		if prepared := mustPrepare(t, m, newClaim("u1", sliceA0, wholeC)); len(prepared) != 2 {
			t.Errorf("got %+v", prepared)
		}
		if status := survey(t.Context(), m); len(findings(status)) > 0 {
			t.Errorf("survey: %+v", status)
		}
	}
	if got := b.onHardware(); len(got) > 0 {
		t.Errorf("effects: %v", got)
	}
	b.wantState(t, "both have looked", want)
	mustUnprepare(t, next, "u1")
	mustPrepare(t, old, newClaim("u3", halfA0))
	mustUnprepare(t, old, "u2")
	mustUnprepare(t, next, "u3")

	// Both reconcile the same leftovers at once, while claims come and go.
	for i, device := range []string{sliceA0, sliceA4, sliceB0} {
		b.kill(t, "create compute instance", "dead"+string(rune('0'+i)), device)
	}
	old, next = b.manager(), b.manager()
	var wg sync.WaitGroup
	for _, m := range []*Manager{old, next} {
		wg.Go(func() {
			for range 5 {
				if err := m.cleanUp(t.Context()); err != nil {
					t.Errorf("reconcile: %v", err)
				}
			}
		})
		wg.Go(func() {
			for range 5 {
				if _, err := m.Prepare(t.Context(), newClaim("u4", sliceA0)); err != nil {
					t.Errorf("prepare: %v", err)
				}
			}
		})
	}
	wg.Wait()
	mustUnprepare(t, next, "u4")
	mustReconcile(t, old)
	b.wantNothing()
}
