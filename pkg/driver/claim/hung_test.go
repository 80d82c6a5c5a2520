// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// hangAt makes the nth effect of this name the call that does not return.
func (b *box) hangAt(effect string, nth int, pciAddress string) (comeBack func()) {
	done := make(chan func(), 1)
	var count atomic.Int32
	b.hooks(func(e string) error {
		if e != effect || int(count.Add(1)) != nth {
			return nil
		}
		call, back := b.hang(pciAddress)
		done <- back
		return call
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
		b := newBox(t)
		m, other := b.manager(), b.manager()
		comeBack := b.hangOn("create instance", pciB)
		_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0))
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
			if _, err := m.Prepare(t.Context(), newClaim(claim, sliceA4, sliceB0)); !errors.Is(err, gpu.ErrHung) {
				t.Errorf("claim %s: got %v", claim, err)
			}
		}
		if waited := time.Since(start); waited > 0 {
			t.Errorf("others have waited for %s", waited)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err = other.Prepare(ctx, newClaim("u3", wholeB))
		cancel()
		wantError(t, err, "GPU "+pciB+" is busy")

		status := survey(t.Context(), m)
		if len(status.Conditions) != 2 || status.Conditions[0].Reason != device.Unresponsive || status.Conditions[0].PCIAddress != pciB ||
			status.Conditions[1].Reason != device.ReleasePending || status.Conditions[1].Where == nil {
			t.Errorf("survey: %+v", status)
		}
		mustUnprepare(t, m, "u1") // pods can end
		if diff := cmp.Diff([]string{"MIG mode of " + pciB, "record of u1"}, b.state()); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if err := m.cleanUp(t.Context()); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("reconcile: got %v", err)
		}

		b.mu.Lock()
		err = b.place(addressB0)
		b.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		comeBack()
		synctest.Wait()
		mustReconcile(t, m)
		b.wantNothing()
		mustPrepare(t, other, newClaim("u3", wholeB))
		mustUnprepare(t, m, "u3")
		if status := survey(t.Context(), m); len(status.Conditions) > 0 {
			t.Errorf("survey at the end: %+v", status)
		}
	})
}

// TestReleaseBehindHungGPU: a GPU whose call waits behind one on another GPU is not hung itself. A look at it ends at once and has seen
// nothing, but its record says what the release has left.
func TestReleaseBehindHungGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
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
		if diff := cmp.Diff(want, findings(survey(t.Context(), m))); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		backB()
		backA()
		synctest.Wait()
		mustReconcile(t, m)
		if got := findings(survey(t.Context(), m)); len(got) > 0 {
			t.Errorf("after the release: %q", got)
		}
		b.wantNothing()
	})
}

// A release that hangs on one GPU frees the places on the other, and lets the pod
// go.
func TestUnprepareHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
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
		if waited := time.Since(start); waited > 0 {
			t.Errorf("others have waited for %s", waited)
		}
		comeBack()
		synctest.Wait()
		// The next claim for the place does not need Reconcile.
		mustPrepare(t, m, newClaim("u3", halfA0))
		mustUnprepare(t, m, "u3")
		b.wantNothing()
	})
}

// What a killed plugin left on two GPUs is in the way of nobody on the one that
// works.
func TestAbandonedOnHangingGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		b.kill(t, "write spec", "dead", sliceA0, sliceB0)
		m := b.manager()
		_, comeBack := b.hang(pciB)
		start := time.Now()
		mustPrepare(t, m, newClaim("u1", halfA0))
		if _, err := m.Prepare(t.Context(), newClaim("u2", sliceB0)); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("got %v", err)
		}
		if waited := time.Since(start); waited > time.Microsecond {
			t.Errorf("waited for %s", waited)
		}
		comeBack()
		synctest.Wait()
		mustPrepare(t, m, newClaim("u2", sliceB0))
		mustUnprepare(t, m, "u1")
		mustUnprepare(t, m, "u2")
		b.wantNothing()
	})
}

// Those who wait for the GPU already are told as well.
func TestHangWakesThoseWhoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		proceed := make(chan struct{})
		var comeBack func()
		b.hooks(func(e string) error {
			if e != "create instance" {
				return nil
			}
			<-proceed
			call, back := b.hang(pciA)
			comeBack = back
			return call
		}, nil)
		results := make(chan error)
		prepare := func(uid, device string) {
			_, err := m.Prepare(t.Context(), newClaim(uid, device))
			results <- err
		}
		go prepare("u1", sliceA0)
		synctest.Wait()
		go prepare("u2", sliceA4)
		go prepare("u3", sliceA1)
		synctest.Wait()
		start := time.Now()
		close(proceed)
		for range 3 {
			if err := <-results; !errors.Is(err, gpu.ErrHung) {
				t.Errorf("got %v", err)
			}
		}
		if waited := time.Since(start); waited > time.Microsecond {
			t.Errorf("waited for %s", waited)
		}
		b.hooks(nil, nil)
		comeBack()
		synctest.Wait()
		mustReconcile(t, m)
		b.wantNothing()
	})
}

// What a whole GPU has to be taken back is not known before it answers. Nothing else of the claim waits.
func TestWholeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		b.leaveModeOn(pciA)
		m := b.manager()
		comeBack := b.hangOn("mode off", pciA)
		if _, err := m.Prepare(t.Context(), newClaim("u1", wholeA, wholeB)); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("got %v", err)
		}
		b.hooks(nil, nil)
		b.wantState(t, "not prepared", []string{"MIG mode of " + pciA, "record of u1"})
		mustPrepare(t, m, newClaim("u2", wholeB))
		if _, err := m.Prepare(t.Context(), newClaim("u1", sliceA0)); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("got %v", err)
		}
		comeBack()
		synctest.Wait()
		mustPrepare(t, m, newClaim("u1", sliceA0))
		mustUnprepare(t, m, "u1")
		mustUnprepare(t, m, "u2")
		b.wantNothing()
	})
}

// TestUnprepareWhileAnotherProcessHangs: whether the call returns cannot be seen
// from here, so the pod ends and what waits for the GPU stays written down.
func TestUnprepareWhileAnotherProcessHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m, other := b.manager(), b.manager()
		mustPrepare(t, other, newClaim("run", sliceA4, sliceB0))
		comeBack := b.hangOn("create instance", pciA)
		if _, err := m.Prepare(t.Context(), newClaim("u1", sliceA0)); !errors.Is(err, gpu.ErrHung) {
			t.Fatal(err)
		}
		b.hooks(nil, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 45*time.Second)
		defer cancel()
		if err := other.Unprepare(ctx, "run"); err != nil {
			t.Errorf("the pod cannot end: %v", err)
		}
		if b.count(pciB) != 0 {
			t.Error("the partition on the GPU that works is still there")
		}
		comeBack()
		synctest.Wait()
		for _, m := range []*Manager{m, other} {
			if err := m.cleanUp(t.Context()); err != nil {
				t.Error(err)
			}
		}
		b.wantNothing()
	})
}
