// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
)

// ownAndMore has a session on two GPUs, and a time slice on a third one.
func ownAndMore() *resourceapi.ResourceClaim {
	return configure(configure(newClaim("u1", wholeA, wholeB, wholeC), fromClaim, gpuMPS, "r0", "r1"), fromClaim, gpuLong, "r2")
}

// A session on several GPUs cannot be ended on one of them: what has nothing to do with it does not wait.
func TestSessionHangs(t *testing.T) {
	for _, effect := range []string{"stop session", "default mode"} {
		synctest.Test(t, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, ownAndMore())
			comeBack := b.hangAt(effect, 1, pciB)
			start := time.Now()
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			r, err := m.store.Read("u1")
			if err != nil || r == nil || !slices.Contains(marked(r), wholeB) || b.spec("u1") != nil {
				t.Errorf("%s: left %+v, %v", effect, r, err)
			}
			mustPrepare(t, m, newClaim("u2", turnsC))
			mustUnprepare(t, m, "u2")
			if _, err := m.Prepare(t.Context(), newClaim("u3", mpsB)); !errors.Is(err, gpu.ErrHung) {
				t.Errorf("%s: got %v", effect, err)
			}
			if waited := time.Since(start); waited > time.Microsecond {
				t.Errorf("%s: waited for %s", effect, waited)
			}
			comeBack()
			synctest.Wait()
			mustPrepare(t, m, newClaim("u3", mpsB))
			mustUnprepare(t, m, "u3")
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

// Calls may be out on several GPUs of one session: none of them is free before its
// own has returned.
func TestSessionHangsTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		var backs []func()
		b.hooks(func(e string) error {
			if e != "start session" {
				return nil
			}
			callA, backA := b.hang(pciA)
			callB, backB := b.hang(pciB)
			backs = append(backs, backA, backB)
			return fmt.Errorf("twice: %w", errors.Join(fmt.Errorf("first: %w", callA), errors.New("no"), callB))
		}, nil)
		if _, err := m.Prepare(t.Context(), configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS)); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("got %v", err)
		}
		b.hooks(nil, nil)
		for i, free := range []bool{false, true} {
			backs[0]()
			backs = backs[1:]
			synctest.Wait()
			if release, err := m.locks.GPUs(t.Context(), []string{pciB}); (err == nil) != free {
				t.Errorf("%d calls out, the second GPU: %v", 1-i, err)
			} else if release != nil {
				release()
			}
		}
		mustUnprepare(t, m, "u1")
		mustReconcile(t, m)
		b.wantNothing()
	})
}

// Another process holds one of the GPUs of a session: the pod ends.
func TestSessionIsBusyElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m, other := b.manager(), b.manager()
		mustPrepare(t, m, ownAndMore())
		release, err := other.locks.GPUs(t.Context(), []string{pciB})
		if err != nil {
			t.Fatal(err)
		}
		mustUnprepare(t, m, "u1")
		if b.spec("u1") != nil || slices.Contains(b.state(), "interval Long of GPU-c") {
			t.Errorf("left: %v", b.state())
		}
		release()
		mustReconcile(t, other)
		b.wantNothing()
	})
}

// A supervisor that takes calls and does not answer is like none: pods end.
func TestSupervisorHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, portion("small", mpsA, "1Gi", "10"))
		mustPrepare(t, m, portion("large", mpsA, "3Gi", "30"))
		mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, gpuMPS))
		b.mute = true
		for _, uid := range []types.UID{"large", "small", "own"} {
			start := time.Now()
			mustUnprepare(t, m, uid)
			if waited := time.Since(start); waited > 5*time.Second {
				t.Errorf("%s: waited for %s", uid, waited)
			}
		}
		b.mute = false
		mustReconcile(t, m)
		b.wantNothing()
	})
}

// TestSupervisorHangsForOthers: nobody looks after a GPU behind a supervisor that does not answer while a claim that has nothing
// of MPS waits for it.
func TestSupervisorHangsForOthers(t *testing.T) {
	for name, look := range map[string]func(t *testing.T, m *Manager){
		"survey":    func(t *testing.T, m *Manager) { t.Helper(); survey(t.Context(), m) },
		"reconcile": func(t *testing.T, m *Manager) { t.Helper(); _ = m.cleanUp(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u1", wholeC))
				mute := func(is bool) {
					b.mu.Lock()
					defer b.mu.Unlock()
					b.mute = is
				}
				mute(true)
				done := make(chan struct{})
				go func() {
					defer close(done)
					for range 3 {
						look(t, m)
					}
				}()
				synctest.Wait()
				start := time.Now()
				mustUnprepare(t, m, "u1")
				for range 8 {
					mustPrepare(t, m, newClaim("u2", sliceB0, wholeC))
					mustUnprepare(t, m, "u2")
					if waited := time.Since(start); waited > 0 {
						t.Errorf("waited for %s", waited)
					}
					time.Sleep(time.Second)
					start = time.Now()
				}
				mute(false)
				<-done
				mustReconcile(t, m)
				b.wantNothing()
			})
		})
	}
}

// TestSupervisorAnswersAgain: a claim with a session asks itself, whatever others have found, and its neighbour on the GPU waits for no
// supervisor that was found to be silent.
func TestSupervisorAnswersAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mute := func(is bool) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.mute = is
		}
		took := func(what string, do func()) {
			t.Helper()
			if start := time.Now(); true {
				if do(); time.Since(start) > 0 {
					t.Errorf("%s: %s", what, time.Since(start))
				}
			}
		}
		mustPrepare(t, m, newClaim("u1", mpsSliceA0))
		mute(true)
		m.convergeGPU(t.Context(), pciB, nothing) // it notices
		took("beside a session", func() {
			mustPrepare(t, m, newClaim("u2", sliceA4))
			mustUnprepare(t, m, "u2")
		})
		mute(false)
		took("the supervisor answers again", func() {
			mustPrepare(t, m, newClaim("u3", mpsB))
			mustUnprepare(t, m, "u3")
			mustUnprepare(t, m, "u1")
		})
		b.wantNothing()
	})
}
