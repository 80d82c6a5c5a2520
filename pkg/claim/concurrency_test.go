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
