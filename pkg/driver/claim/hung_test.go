// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
)

// hangAt makes the first effect of this name the call that does not return.
func (b *box) hangAt(effect, pciAddress string) (comeBack func()) {
	done := make(chan func(), 1)
	var once sync.Once
	b.hooks(func(e string) (err error) {
		if e == effect {
			once.Do(func() {
				call, back := b.hang(pciAddress)
				done <- back
				err = call
			})
		}
		return err
	}, nil)
	return func() { (<-done)() }
}

// marked are the devices of which something may be left.
func marked(r *record.Record) []string {
	var names []string
	for i := range r.Devices {
		if r.Devices[i].Mark != record.Untouched {
			names = append(names, r.Devices[i].Device)
		}
	}
	return names
}

// hangOn makes the first effect of this name on a GPU the call that does not return.
func (b *box) hangOn(effect, pciAddress string) (comeBack func()) {
	done := make(chan func(), 1)
	b.beforeEffect(func(address, e string) error {
		if e != effect || address != pciAddress {
			return nil
		}
		call, back := b.hang(pciAddress)
		done <- back
		return call
	})
	return func() { b.beforeEffect(nil); (<-done)() }
}

// A call on one GPU of a claim does not return: the other GPU is as before, this
// one is nobody's until the call is back, and what the call has done by then is
// taken back.
func TestPrepareHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m, other := newPair(t)
		comeBack := b.hangOn("create instance", pciB)
		err := runPrepare(t.Context(), m, newClaim("u1", sliceA0, sliceB0))
		var call *gpu.PendingError
		if !errors.As(err, &call) || call.PCIAddress != pciB {
			t.Errorf("got %v", err)
		}
		wantError(t, err, "device "+sliceB0)
		b.hooks(nil, nil)
		if b.count(pciA) != 0 || b.spec("u1") != nil {
			t.Errorf("the other GPU was not undone: %v", b.state())
		}

		start := time.Now()
		for _, free := range []*Manager{m, other} {
			mustPrepare(t, free, newClaim("free", sliceA0, wholeC))
			mustUnprepare(t, free, "free")
		}
		for _, claim := range []string{"u1", "u2"} {
			expect.Is(t, runPrepare(t.Context(), m, newClaim(claim, sliceA4, sliceB0)), gpu.ErrHung)
		}
		wantWithin(t, start, 0)
		wantError(t, runPrepare(cancelled(t), other, newClaim("u3", wholeB)), "GPU "+pciB+" is busy")
		wantFindings(t, m, "unresponsive "+pciB+" whole", "release-pending "+pciB+" 19@0:1")
		mustUnprepare(t, m, "u1") // pods can end
		expect.Same(t, b.state(), []string{"MIG mode of " + pciB, "record of u1"})
		expect.Is(t, m.cleanUp(t.Context()), gpu.ErrHung)

		b.locked(func() { err = b.place(addressB0) })
		if err != nil {
			t.Fatal(err)
		}
		comeBack()
		synctest.Wait()
		mustReconcile(t, m)
		b.wantNothing()
		mustPrepare(t, other, newClaim("u3", wholeB))
		mustUnprepare(t, m, "u3")
		wantFindings(t, m)
	})
}

// TestReleaseBehindHungGPU: a GPU whose call waits behind one on another GPU is not hung itself. A look at it ends at once and has seen
// nothing, but its record says what the release has left.
func TestReleaseBehindHungGPU(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0))
		mustPrepare(t, m, newClaim("u2", sliceB0))
		mustReconcile(t, m)
		backB := b.hangOn("destroy instance", pciB)
		mustUnprepare(t, m, "u2")
		time.Sleep(2 * time.Second)
		backA := b.hangOn("destroy instance", pciA)
		mustUnprepare(t, m, "u1")
		b.pass(time.Minute)
		want := []string{"release-pending " + pciA + " 19@0:1", "unresponsive " + pciB + " whole", "release-pending " + pciB + " 19@0:1"}
		wantFindings(t, m, want...)
		backB()
		backA()
		synctest.Wait()
		mustReconcile(t, m)
		wantFindings(t, m)
		b.wantNothing()
	})
}

// A release that hangs on one GPU frees the places on the other, and lets the pod
// go.
func TestUnprepareHangs(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0, wholeC))
		comeBack := b.hangOn("destroy instance", pciA)
		mustUnprepare(t, m, "u1")
		b.hooks(nil, nil)
		if b.count(pciA) != 1 || b.count(pciB) != 0 || b.spec("u1") != nil {
			t.Errorf("left: %v", b.state())
		}
		r, err := m.store.Read("u1")
		if err != nil || r.State != record.Releasing || !slices.Equal(marked(r), []string{sliceA0}) {
			t.Errorf("record: %+v, %v", r, err)
		}
		start := time.Now()
		mustPrepare(t, m, newClaim("u2", sliceB0, wholeC))
		mustUnprepare(t, m, "u2")
		mustUnprepare(t, m, "u1")
		wantWithin(t, start, 0)
		comeBack()
		synctest.Wait()
		// The next claim for the place does not need Reconcile.
		mustPrepare(t, m, newClaim("u3", halfA0))
		b.endAll(m, "u3")
	})
}

// TestUnprepareWhileAnotherProcessHangs: whether the call returns cannot be seen
// from here, so the pod ends and what waits for the GPU stays written down.
func TestUnprepareWhileAnotherProcessHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m, other := newPair(t)
		mustPrepare(t, other, newClaim("run", sliceA4, sliceB0))
		comeBack := b.hangOn("create instance", pciA)
		expect.Is(t, runPrepare(t.Context(), m, newClaim("u1", sliceA0)), gpu.ErrHung)
		start := time.Now()
		mustUnprepare(t, other, "run")
		wantWithin(t, start, 20*time.Second)
		expect.Same(t, b.count(pciB), 0) // that GPU works
		comeBack()
		synctest.Wait()
		mustReconcile(t, m)
		mustReconcile(t, other)
		b.wantNothing()
	})
}

// ownAndMore has a session on two GPUs, and a time slice on a third one.
func ownAndMore() *resourceapi.ResourceClaim {
	return configure(configure(newClaim("u1", wholeA, wholeB, wholeC), fromClaim, gpuMPS, "r0", "r1"), fromClaim, gpuLong, "r2")
}

// A session on several GPUs cannot be ended on one of them: what has nothing to do with it does not wait.
func TestSessionHangs(t *testing.T) {
	for _, effect := range []string{"stop session", "default mode"} {
		onNode(t, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, ownAndMore())
			comeBack := b.hangAt(effect, pciB)
			start := time.Now()
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			r, err := m.store.Read("u1")
			if err != nil || r == nil || !slices.Contains(marked(r), wholeB) || b.spec("u1") != nil {
				t.Errorf("%s: left %+v, %v", effect, r, err)
			}
			mustPrepare(t, m, newClaim("u2", turnsC))
			mustUnprepare(t, m, "u2")
			expect.Is(t, runPrepare(t.Context(), m, newClaim("u3", mpsB)), gpu.ErrHung)
			wantWithin(t, start, time.Microsecond)
			comeBack()
			synctest.Wait()
			mustPrepare(t, m, newClaim("u3", mpsB))
			mustUnprepare(t, m, "u3")
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

// TestSessionHangsTwice: calls may be out on several GPUs of one session. None of them is free before its own has returned.
func TestSessionHangsTwice(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		var backs []func()
		b.hooks(func(e string) error {
			if e != "start session" {
				return nil
			}
			callA, backA := b.hang(pciA)
			callB, backB := b.hang(pciB)
			backs = append(backs, backA, backB)
			return fmt.Errorf("twice: %w", errors.Join(fmt.Errorf("first: %w", callA), errFault, callB))
		}, nil)
		expect.Is(t, runPrepare(t.Context(), m, configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS)), gpu.ErrHung)
		b.hooks(nil, nil)
		for i, free := range []bool{false, true} {
			backs[i]()
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
		b, m, other := newPair(t)
		mustPrepare(t, m, ownAndMore())
		release := b.lockGPU(other, pciB)
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
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, portion("small", mpsA, "1Gi", "10"))
		mustPrepare(t, m, portion("large", mpsA, "3Gi", "30"))
		mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, gpuMPS))
		b.mute = true
		for _, uid := range []types.UID{"large", "small", "own"} {
			start := time.Now()
			mustUnprepare(t, m, uid)
			wantWithin(t, start, 5*time.Second)
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
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", wholeC))
			b.silence(true)
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
				wantWithin(t, start, 0)
				time.Sleep(time.Second)
				start = time.Now()
			}
			b.silence(false)
			<-done
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

// TestSupervisorAnswersAgain: a claim with a session asks itself, whatever others have found, and its neighbour on the GPU waits for no
// supervisor that was found to be silent.
func TestSupervisorAnswersAgain(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", mpsSliceA0))
		b.silence(true)
		m.convergeGPU(t.Context(), pciB, nothing) // it notices
		start := time.Now()
		mustPrepare(t, m, newClaim("u2", sliceA4))
		mustUnprepare(t, m, "u2")
		wantWithin(t, start, 0)
		b.silence(false)
		start = time.Now()
		mustPrepare(t, m, newClaim("u3", mpsB))
		b.endAll(m, "u3", "u1")
		wantWithin(t, start, 0)
	})
}
