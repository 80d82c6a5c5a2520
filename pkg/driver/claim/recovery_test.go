// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
)

// once makes a function that is true the first time.
func once() func() bool {
	var o sync.Once
	return func() (first bool) { o.Do(func() { first = true }); return first }
}

// What was made on GPU A cannot be undone, and its session is gone. The next Prepare goes on with the half undone record: a
// share without MPS is not prepared.
func TestStateTurnedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		const id = sliceA0
		failed := make(chan struct{})
		fail := sync.OnceFunc(func() { close(failed) })
		var back func()
		b.beforeEffect(func(address, e string) error {
			switch {
			case address == pciA && e == "destroy instance":
				call, comeBack := b.hang(pciA)
				back = comeBack
				return call
			case address == pciB && e == "create instance":
				<-failed
				return errors.New("canceled, or anything else")
			}
			return nil
		})
		b.hooks(func(e string) error {
			if e == "start session" {
				fail()
				return errors.New("the daemon does not start")
			}
			return nil
		}, nil)
		claim := newClaim("u1", mpsSliceA0, sliceB0)
		_, err := m.Prepare(t.Context(), claim)
		t.Log("first:", err)
		if r, err := m.store.Read("u1"); err != nil || r == nil || r.State == record.Prepared || !slices.Equal(marked(r), []string{mpsSliceA0}) {
			t.Errorf("half undone and written down as %+v, %v", r, err)
		}
		b.beforeEffect(nil)
		b.hooks(nil, nil)
		back()
		synctest.Wait()
		// Another pod with the same claim, or the kubelet again, before Reconcile.
		_, err = m.Prepare(t.Context(), claim)
		if err == nil && b.running(id) == nil {
			t.Errorf("the MPS share is prepared without MPS: %v", b.state())
		}
	})
}

// A damaged record of the claim is in the quarantine. One of its groups overlaps with
// another claim's device: the "undo" of what was never begun destroys that.
func TestUndoOfWhatWasNeverBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		write(t, m.store.Path("u1"), "")
		_ = m.Unprepare(t.Context(), "u1")
		mustReconcile(t, m)
		b.pass(time.Second)
		mustPrepare(t, m, newClaim("u2", sliceB0))
		write(t, m.store.Path("u1"), "")
		_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0))
		t.Log(err)
		if _, found := b.look(addressB0); !found {
			t.Errorf("the partition of u2, which is prepared, was destroyed: %v", b.state())
		}
	})
}

// The same with a session: the server of another claim is stopped.
func TestUndoOfSessionNeverBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, configure(newClaim("u2", wholeA), fromClaim, gpuMPS))
		write(t, m.store.Path("u1"), "")
		_, err := m.Prepare(t.Context(), newClaim("u1", mpsA, sliceB0))
		t.Log(err)
		if b.running(wholeA) == nil {
			t.Errorf("the MPS server of u2, which is prepared, was ended: %v", b.state())
		}
	})
}

// answers is an API server.
type answers func(ref Ref) (*resourceapi.ResourceClaim, error)

func (a answers) Claim(_ context.Context, ref Ref) (*resourceapi.ResourceClaim, error) { return a(ref) }

// A named claim is deallocated, the API server says so, and while the answer is on its
// way the claim is allocated anew and prepared.
func TestOrphanThatCameBack(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	unallocated := newClaim("u1")
	unallocated.Status.Allocation = nil
	again := func() {}
	m.orphans.cluster = answers(func(Ref) (*resourceapi.ResourceClaim, error) { again(); return unallocated, nil })
	_ = reconcile(t, m)
	b.pass(DefaultOrphanGrace)
	again = func() {
		// The kubelet has caught up, and a new pod uses the claim.
		mustUnprepare(t, m, "u1")
		b.pass(time.Millisecond)
		mustPrepare(t, m, newClaim("u1", sliceA4))
	}
	_ = reconcile(t, m)
	if _, found := b.look(addressA4); !found || len(b.spec("u1")) == 0 {
		t.Errorf("a claim that is allocated and was just prepared was released: %v", b.state())
	}
}

// A claim with two GPUs is prepared again, and while its CDI spec is being written its
// partition goes and another claim gets the ids.
func TestStaleSpecOfSeveralGroups(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
	mustReconcile(t, m)
	if err := b.Remove("u1"); err != nil {
		t.Fatal(err)
	}
	first := once()
	other, done := b.manager(), make(chan error, 1)
	b.hooks(func(e string) error {
		if e == "write spec" && first() {
			was, _ := b.look(addressA0)
			b.loseAndReuse()
			b.mu.Lock()
			b.nextID = was.InstanceID
			b.mu.Unlock()
			go func() { done <- runPrepare(t.Context(), other, newClaim("u2", sliceA4)) }()
		}
		return nil
	}, nil)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0))
	t.Log(err)
	if err := <-done; err != nil {
		t.Error(err)
	}
	b.wantOwnNodes("prepared again", "u1", "u2")
	// Nor does it go at once.
	_ = m.cleanUp(t.Context())
	b.wantOwnNodes("reconciled", "u1", "u2")
}

// A plugin is killed between destroying the compute instance and the GPU instance of the
// last share of a partition. The next claim for a share there goes on with what is left.
func TestShareOfHalfReleasedPartition(t *testing.T) {
	b := newBox(t)
	share := sliceA0 + "-timeslice"
	mustPrepare(t, b.manager(), newClaim("u1", share))
	b.hooks(b.killAt("destroy instance"), nil)
	if err := b.manager().Unprepare(t.Context(), "u1"); !b.killed() {
		t.Fatalf("the plugin was not killed: %v", err)
	}
	b.hooks(nil, nil)
	m := b.manager()
	mustPrepare(t, m, newClaim("u2", share))
	mustUnprepare(t, m, "u1")
	if _, found := b.look(addressA0); !found {
		t.Error("the partition of the other claim was destroyed")
	}
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// A call that repeats the preparation of a claim on two GPUs ends early. The claim keeps
// its CDI spec, which containers of running pods need when they are started again.
func TestSpecOutlivesRepeatedPrepare(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	claim := newClaim("u1", sliceA0, sliceB0)
	mustPrepare(t, m, claim)
	ctx, cancel := context.WithCancel(t.Context())
	b.hooks(nil, func(string) error { cancel(); return nil })
	_, err := m.Prepare(ctx, claim)
	t.Log(err)
	if len(b.spec("u1")) == 0 {
		t.Errorf("the claim lost its CDI spec: %v", b.seen())
	}
}

// The partition of a claim with two GPUs is made again, and something else of the
// claim fails, so that this is not written down. It is no reason to take it for gone.
func TestRemadeAndNotWrittenDown(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	claim := newClaim("u1", sliceA0, sliceB0)
	mustPrepare(t, m, claim)
	b.removeForeign(addressA0)
	b.hooks(func(e string) error {
		if e == "write spec" {
			return unix.ENOSPC
		}
		return nil
	}, nil)
	if _, err := m.Prepare(t.Context(), claim); err == nil {
		t.Fatal("no error")
	}
	b.hooks(nil, nil)
	survey(t.Context(), m)
	if err := m.cleanUp(t.Context()); err != nil {
		t.Errorf("the partition is there: %v; %v", err, b.state())
	}
}

// The second try within one call goes on with the record that it started with, and not
// with what the first one has written down.
func TestRetryWithStaleRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", mpsSliceA0))
		b.mu.Lock()
		delete(b.sessions, sliceA0)
		b.mu.Unlock()
		b.removeForeign(addressA0)
		first := once()
		b.hooks(func(e string) error {
			if e == "start session" && first() {
				return sharing.ErrNoSupervisor
			}
			return nil
		}, nil)
		if _, err := m.Prepare(t.Context(), newClaim("u1", mpsSliceA0)); err != nil {
			t.Errorf("the first failure passes: %v", err)
		}
		if n := len(b.warnings); n > 1 {
			t.Errorf("one loss, %d events: %q", n, b.warnings)
		}
	})
}

// An error of one group wraps context.Canceled and the call is not canceled: the
// supervisor's own, which pkg/mps passes on as such.
func TestCanceledElsewhere(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.hooks(func(e string) error {
		if e == "start session" {
			return fmt.Errorf("the supervisor is ending: %w", context.Canceled)
		}
		return nil
	}, nil)
	devices, err := m.Prepare(t.Context(), newClaim("u1", mpsA, sliceB0))
	t.Log(err)
	if err != nil && strings.Contains(err.Error(), "nil pointer") {
		t.Error(err)
	}
	if err == nil {
		t.Errorf("prepared with %d of 2 devices: %+v", len(devices), devices)
	}
}

// Two claims have shares of a partition, the record of one cannot be read. The other is
// released, and the partition goes.
func TestPartitionOfUnreadableShare(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", turnSliceA0))
	mustPrepare(t, m, newClaim("u2", turnSliceA0))
	otherVersion(t, m, "u2")
	if err := m.Unprepare(t.Context(), "u1"); err != nil {
		t.Log(err)
	}
	if _, found := b.look(addressA0); !found {
		t.Error("the partition was destroyed under the claim of another version")
	}
}

// An orphan on a full disk.
func TestOrphanOnFullDisk(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.deleteClaim("u1")
	b.hooks(func(e string) error {
		if strings.HasPrefix(e, "write ") {
			return unix.ENOSPC
		}
		return nil
	}, nil)
	_ = reconcile(t, m)
	b.pass(DefaultOrphanGrace)
	err := reconcile(t, m)
	if _, found := b.look(addressA0); found {
		t.Errorf("not released: %v", err)
	}
}

// The CDI spec of a claim whose partition is gone cannot be removed, and the next
// partition is made all the same.
func TestStaleSpecStays(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.loseAndReuse()
	b.hooks(func(e string) error {
		if e == "remove spec" {
			return unix.EIO
		}
		return nil
	}, nil)
	_, err := m.Prepare(t.Context(), newClaim("u2", sliceA4))
	t.Log(err)
	b.wantOwnNodes("made", "u1", "u2")
}

// A claim has more shares than the device.
func TestTooManyOwnShares(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	devices := slices.Repeat([]string{turnSliceA0}, 5) // of 4
	claim := newClaim("u1", devices...)
	for i := range claim.Status.Allocation.Devices.Results {
		id := types.UID(fmt.Sprintf("s%d", i))
		claim.Status.Allocation.Devices.Results[i].ShareID = &id
	}
	if _, err := m.Prepare(t.Context(), claim); err == nil {
		t.Error("5 of 4 shares")
	} else {
		t.Log(err)
	}
}

// A claim has two shares of a partition, or of a GPU.
func TestTwoShares(t *testing.T) {
	for _, device := range []string{turnSliceA0, mpsSliceA0, mpsA, turnsA, turnsC} {
		t.Run(device, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			if _, err := m.Prepare(t.Context(), newClaim("u1", device, device)); err != nil {
				t.Error(err)
			}
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}

// Of a claim with two groups the first is undone, and the disk is full when that is
// to be written down. Another claim with a share of the same partition is released
// meanwhile, and leaves the partition to the record that is still there. That record is
// removed without a look when the second group is undone.
func TestDropThatWasNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newShare("u2", mpsSliceA0, map[resourceapi.QualifiedName]string{"smPercent": "10"}))
		var failing atomic.Bool // the groups of a claim are prepared side by side
		b.hooks(func(e string) error {
			switch {
			case e == "set limits":
				failing.Store(true)
				return errors.New("limits cannot be set")
			case failing.Load() && strings.HasPrefix(e, "write preparing"):
				return unix.ENOSPC
			}
			return nil
		}, nil)
		goOn := make(chan struct{})
		b.beforeEffect(func(address, _ string) error {
			if address == pciB {
				<-goOn
				return errors.New("canceled, or anything else")
			}
			return nil
		})
		done := make(chan error)
		go func() {
			_, err := m.Prepare(t.Context(), newClaim("u1", mpsSliceA0, sliceB0))
			done <- err
		}()
		synctest.Wait()
		b.pass(time.Second)
		mustUnprepare(t, m, "u2")
		close(goOn)
		t.Log(<-done)
		b.beforeEffect(nil)
		b.hooks(nil, nil)
		mustUnprepare(t, m, "u1")
		mustReconcile(t, m)
		b.wantNothing()
		if s := survey(t.Context(), m); len(s.Static) > 0 {
			t.Errorf("published as somebody else's: %+v", s.Static)
		}
	})
}

// A claim with two groups: the plugin is killed between the CDI spec and the record.
// Prepared again, a group fails and all is undone, except for the CDI spec.
func TestSpecOfUndoneClaim(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.hooks(nil, b.killAt("write spec"))
	_, _ = m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0))
	m = b.manager()
	b.hooks(nil, nil)
	was, _ := b.look(addressA0)
	b.breakDown(pciB, gpu.ErrResetRequired)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, sliceB0))
	t.Log(err)
	if _, found := b.look(addressA0); found {
		t.Fatal("not undone")
	}
	if len(b.spec("u1")) > 0 {
		t.Errorf("the claim is undone and has a CDI spec: %v", b.state())
	}
	b.mu.Lock()
	b.nextID = was.InstanceID
	b.mu.Unlock()
	mustPrepare(t, m, newClaim("u2", sliceA4))
	b.wantOwnNodes("undone", "u1", "u2")
}

// A disk is full, and a GPU is in use: the release is written down all the same, and comes to its end after a restart.
func TestPendingReleaseOnFullDisk(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
	b.pass(time.Second)
	b.run(pciB, gpu.Process{PID: 7, InstanceID: func() int { l, _ := b.look(addressB0); return l.InstanceID }()})
	b.hooks(func(e string) error {
		if strings.HasPrefix(e, "write ") {
			return unix.ENOSPC
		}
		return nil
	}, nil)
	mustUnprepare(t, m, "u1")
	b.hooks(nil, nil)
	b.run(pciB)
	mustReconcile(t, b.manager())
	b.wantNothing()
}
