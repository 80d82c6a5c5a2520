// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

// A claim that does not exist any more is left to the kubelet for a while, counted
// from when this process saw it.
func TestOrphanGrace(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("u2", sliceA4))
	before := b.state()
	keeps := func(when string) {
		t.Helper()
		mustReconcile(t, m)
		b.wantState(t, when, before)
	}
	keeps("it exists")
	b.pass(time.Hour)
	b.deleteClaim("u1")
	keeps("just gone")
	b.pass(DefaultOrphanGrace - time.Second)
	keeps("gone, but not for long")

	// Another process begins to count anew.
	other := b.manager()
	mustReconcile(t, other)
	b.wantState(t, "seen by another process", before)

	// While the API server does not answer, nothing is known.
	b.pass(time.Second)
	b.clusterErr = errors.New("connection refused")
	wantError(t, reconcile(t, m), "it is not known which claims still exist: connection refused")
	b.wantState(t, "no API server", before)
	b.clusterErr = nil

	b.wantWarnings()
	mustReconcile(t, m)
	if diff := cmp.Diff([]string{"MIG mode of " + pciA, "instance " + addressA4.String() + " complete=true", "record of u2", "spec of u2"}, b.state()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	b.wantWarnings([]string{"u1 OrphanedClaimReleased", "default/claim-u1"})
	// A Prepare that was on its way comes too late.
	_, err := m.Prepare(arrivedAt(t.Context(), b.clock()-time.Second), newClaim("u1", sliceA0))
	wantError(t, err, "out of date")
	mustReconcile(t, other)
	mustUnprepare(t, m, "u1")
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// A claim that is back was never gone: another API server was behind.
func TestOrphanIsBack(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	before := b.state()
	for range 3 {
		b.gone["u1"] = true
		mustReconcile(t, m)
		b.pass(DefaultOrphanGrace - time.Second)
		b.gone["u1"] = false
		mustReconcile(t, m)
	}
	b.wantState(t, "at the end", before)
	// So is one that the kubelet has released and prepared again.
	b.gone["u1"] = true
	mustReconcile(t, m)
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustReconcile(t, m)
	b.wantState(t, "prepared again", before)
}

// Processes on the devices keep an orphan: they may be those of a container that
// the kubelet has not stopped yet.
func TestOrphanInUse(t *testing.T) {
	for name, test := range map[string]struct {
		device string
		at     partition.Address // nothing for a whole GPU
		taint  []string
	}{
		"whole":     {device: wholeA, taint: []string{"release-pending " + pciA + " whole"}},
		"static":    {device: staticA0, at: addressA0, taint: []string{static(addressA0), "release-pending " + pciA + " 19@0:1"}},
		"partition": {device: sliceA4, at: addressA4, taint: []string{"release-pending " + pciA + " 19@4:1"}},
		"share":     {device: mpsA}, // others may have the rest
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			if name == "static" {
				b.makeForeign(addressA0)
			}
			want := b.state()
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", test.device))
			before := b.state()
			b.deleteClaim("u1")
			mustReconcile(t, m)
			b.pass(DefaultOrphanGrace)
			instance := -1
			if live, found := b.look(test.at); found {
				instance = live.InstanceID
			}
			b.run(pciA, gpu.Process{PID: 4711, InstanceID: instance}, gpu.Process{PID: 4712, InstanceID: instance})
			for range 2 {
				wantError(t, reconcile(t, m), "claim u1", "process 4711 (", "process 4712 (")
			}
			b.wantState(t, "in use", before)
			b.wantStatements(m, []string{"u1 OrphanedClaimInUse", "default/claim-u1", "process 4711 (", "process 4712 ("})
			if diff := cmp.Diff(test.taint, findings(survey(t.Context(), m))); diff != "" {
				t.Errorf("the scheduler takes its device for free: -want +got:\n%s", diff)
			}

			b.breakDown(pciA, gpu.ErrUnknown)
			wantError(t, reconcile(t, m), "claim u1", "no", pciA)
			b.wantState(t, "nobody knows", before)
			b.breakDown(pciA, nil)

			b.run(pciA, gpu.Process{PID: 4713, InstanceID: 99}) // on another instance
			if name == "whole" || name == "share" {
				b.run(pciA)
			}
			mustReconcile(t, m)
			b.wantState(t, "released", want)
			b.wantStatements(m)
			for _, c := range survey(t.Context(), m).Conditions {
				t.Errorf("it is released: %+v", c)
			}
			b.wantWarnings([]string{"u1 OrphanedClaimReleased"})
		})
	}
}

// TestOrphanWithPods: a claim whose pod was deleted by force is kept as long as its containers run, also if they use nothing: they can open
// its devices at any time.
func TestOrphanWithPods(t *testing.T) {
	b := newBox(t)
	var running string
	var unknown error
	m := b.manager()
	m.orphans.pods = func(context.Context, Ref) (string, error) { return running, unknown }
	mustPrepare(t, m, newClaim("u1", wholeC))
	before := b.state()
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	running = "pod team/train-0, which was deleted and runs"
	wantError(t, reconcile(t, m), "claim u1", running)
	b.wantState(t, "it runs", before)
	b.wantStatements(m, []string{"u1 OrphanedClaimInUse", running})
	running, unknown = "", errors.New("no answer")
	wantError(t, reconcile(t, m), "claim u1", "no answer")
	b.wantState(t, "nobody knows", before)
	b.wantStatements(m, []string{"u1 OrphanedClaimInUse", "train-0"}) // what was known last
	if diff := cmp.Diff([]string{"release-pending " + pciC + " whole"}, findings(survey(t.Context(), m))); diff != "" {
		t.Errorf("nobody knows whether it is free: -want +got:\n%s", diff)
	}
	unknown = nil
	mustReconcile(t, m)
	b.wantNothing()
}

// A GPU that never tells its processes does not keep claims for ever.
func TestOrphanWithoutProcessList(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	b.breakDown(pciC, gpu.ErrNotSupported)
	mustReconcile(t, m)
	b.wantNothing()
}

// TestOrphanOnLostGPU: what an orphan has on a GPU that answers is given back; the rest waits until the other one is back.
func TestOrphanOnLostGPU(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	b.breakDown(pciC, gpu.ErrUnknown)
	wantError(t, reconcile(t, m), "claim u1", pciC)
	if b.spec("u1") == nil || b.count(pciA) == 0 {
		t.Errorf("one of its GPUs fails to answer for a moment, and it was released: %v", b.state())
	}
	b.breakDown(pciC, gpu.ErrLost)
	_ = reconcile(t, m)
	if diff := cmp.Diff([]string{"record of u1"}, b.state()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	b.wantWarnings([]string{"u1 OrphanedClaimReleased"})
	mustPrepare(t, m, newClaim("u2", wholeA))
	mustUnprepare(t, m, "u2")
	b.breakDown(pciC, nil)
	mustReconcile(t, m)
	b.wantNothing()
}

// TestOrphanOnFailingGPU: one that has to be reset does not keep the rest of an orphan, and one that fails keeps nothing of what only
// observes it.
func TestOrphanOnFailingGPU(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
	mustPrepare(t, m, admin(newClaim("u2", wholeC)))
	b.deleteClaim("u1")
	b.deleteClaim("u2")
	mustReconcile(t, m)
	b.breakDown(pciC, gpu.ErrUnknown)
	b.pass(DefaultOrphanGrace)
	_ = reconcile(t, m)
	if b.spec("u1") == nil || b.spec("u2") != nil {
		t.Errorf("after the time of grace: %v", b.state())
	}
	b.breakDown(pciC, gpu.ErrResetRequired)
	_ = reconcile(t, m)
	if diff := cmp.Diff([]string{"record of u1"}, b.state()); diff != "" {
		t.Errorf("when it has to be reset: -want +got:\n%s", diff)
	}
}

// TestOrphanWithCall: what a call is at work with is left to it.
func TestOrphanWithCall(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	before := b.state()
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	unlock, err := b.manager().locks.TryClaim("u1")
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, reconcile(t, m), "claim u1", "a call is at work")
	b.wantState(t, "while a call is at work", before)
	b.wantWarnings()
	unlock()
	mustReconcile(t, m)
	b.wantNothing()
}

// TestOrphanPreparedMeanwhile: what is prepared anew while an orphan is released stays.
func TestOrphanPreparedMeanwhile(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	r, err := m.store.Read("u1")
	if err != nil {
		t.Fatal(err)
	}
	b.pass(time.Second)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	want := b.state()
	if err := m.orphans.release(t.Context(), r, r.Arrived+1); err != nil {
		t.Error(err)
	}
	mustReconcile(t, m)
	b.wantState(t, "it was prepared anew", want)
	b.wantWarnings()
}

// TestOrphanOfEarlierBoot: nothing of an earlier boot is left that somebody may use.
func TestOrphanOfEarlierBoot(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("gone", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("stays", sliceA4))
	b.boot("boot-2")
	b.deleteClaim("gone")
	m = b.manager()
	// Its place is another claim's now.
	mustPrepare(t, m, newClaim("new", sliceA0))
	b.run(pciC, gpu.Process{PID: 4711, InstanceID: -1}) // and somebody uses what it had
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	mustReconcile(t, m)
	if diff := cmp.Diff([]string{"MIG mode of " + pciA, "instance " + addressA0.String() + " complete=true", "record of new", "record of stays", "spec of new"}, b.state()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestOrphanOfOldAnswer: a claim that the API server knows again is not released on what it said before.
func TestOrphanOfOldAnswer(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeA))
	b.deleteClaim("u1") // the API server was restored from a backup that is older than the claim
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1}) // its container runs
	wantError(t, reconcile(t, m), "claim u1")
	b.mu.Lock()
	b.gone["u1"] = false // the API server is right again, and stays so
	b.mu.Unlock()
	b.run(pciA) // the container is started again, so that nothing is on the GPU for a moment
	b.pass(30 * time.Second)
	_ = m.cleanUp(t.Context()) // as every 30 seconds
	if b.spec("u1") == nil {
		t.Errorf("the claim exists, is allocated here, and its pod runs; it was released on an old answer: %v, events %q", b.state(), b.warnings)
	}
}

// TestOrphanReleasedMeanwhile: what the kubelet has released while the API server was asked is no orphan.
func TestOrphanReleasedMeanwhile(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	m.orphans.cluster = during{b, func() { mustUnprepare(t, m, "u1") }}
	mustReconcile(t, m)
	if slices.ContainsFunc(b.warnings, func(w string) bool { return strings.Contains(w, ReasonOrphanReleased) }) {
		t.Errorf("the kubelet has released it: %q", b.warnings)
	}
}

// during does something while the API server is asked.
type during struct {
	*box
	do func()
}

func (d during) Claim(ctx context.Context, ref Ref) (*resourceapi.ResourceClaim, error) {
	d.do()
	return d.box.Claim(ctx, ref)
}

// TestOrphansRecordsUnreadable: a claim whose record cannot be read is not asked about again at once.
func TestOrphansRecordsUnreadable(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	o := m.orphans
	o.next()
	o.recheck("u1")
	first, due := o.next()
	if first == nil || due.After(time.Now()) {
		t.Fatalf("claim %v is asked about next, at %v", first, due)
	}
	folder := filepath.Dir(m.store.Path("u1"))
	if err := errors.Join(os.Rename(folder, folder+".away"), os.WriteFile(folder, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	o.ask(t.Context(), first)
	if next, due := o.next(); next != nil || !due.After(time.Now()) {
		t.Errorf("claim %v is asked about again at once", next)
	}
}
