// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// managerWith starts a plugin with other options.
func (b *box) managerWith(change func(o *Options)) *Manager {
	b.t.Helper()
	o := b.options()
	change(&o)
	m := must.Get(NewManager(o))(b.t)
	m.SetInventory(testInventory(b.t))
	return m
}

// TestAllocatedAnew: a claim that was allocated other devices, or the same with another configuration, gets these. What it keeps is not made again.
func TestAllocatedAnew(t *testing.T) {
	plain := func(devices ...string) *resourceapi.ResourceClaim { return newClaim("u1", devices...) }
	for name, test := range map[string]struct{ first, second *resourceapi.ResourceClaim }{
		"other place":    {plain(sliceA0), plain(sliceA4)},
		"other GPU":      {plain(wholeA), plain(wholeB)},
		"other share":    {portion("u1", mpsA, "1Gi", "25"), portion("u1", mpsA, "1Gi", "50")},
		"one more":       {plain(sliceA0), plain(sliceA0, sliceB0)},
		"the same":       {plain(sliceA0, mpsB), plain(sliceA0, mpsB)},
		"another kind":   {plain(turnsA), plain(mpsA)},
		"MPS of its own": {plain(wholeA), configure(plain(wholeA, wholeB), fromClaim, ownMPS)},
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, test.first)
			b.hooks(nil, nil)
			var want, got []string
			for _, d := range mustPrepare(t, m, test.second) {
				got = append(got, d.Device)
			}
			if name == "the same" {
				b.wantWithoutEffects()
			}
			for _, d := range test.second.Status.Allocation.Devices.Results {
				want = append(want, d.Device)
			}
			slices.Sort(want)
			expect.Same(t, slices.Sorted(slices.Values(got)), want)
			if d := m.store.Snapshot().Of("u1").Devices[0]; name == "other share" && d.Sharing.Limits.Percent != 50 {
				t.Errorf("it has the limits %+v", d.Sharing.Limits)
			}
			mustReconcile(t, m)
			b.endAll(m, "u1")
		})
	}
}

// TestAllocatedAnewInUse: nothing is taken from running processes because their claim is allocated other devices.
func TestAllocatedAnewInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m := newNode(t)
		mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeB), fromClaim, ownMPS))
		b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1})
		if err := runPrepare(t.Context(), m, newClaim("u1", wholeA)); err == nil || !b.exclusive["GPU-a"] {
			t.Errorf("got %v, and the compute mode of a GPU in use is exclusive: %t", err, b.exclusive["GPU-a"])
		}
		b.run(pciA)
		mustPrepare(t, m, newClaim("u1", wholeA))
		mustReconcile(t, m)
		b.endAll(m, "u1")
	})
}

// TestFirstInstanceInUse: the mode is changed once, and stays, while somebody's memory keeps the first instance from being made.
func TestFirstInstanceInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m := newNode(t)
		b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1})
		b.hooks(nil, nil)
		expect.Is(t, runPrepare(t.Context(), m, newClaim("u1", sliceA0)), gpu.ErrInUse)
		expect.Same(t, slices.DeleteFunc(b.onHardware(), func(e string) bool { return e == "create instance" }), []string{"mode on"})
		expect.Same(t, b.state(), []string{"MIG mode of " + pciA})
	})
}

// listing does something when the CDI specs were listed.
type listing struct {
	spec.CDI
	then func()
}

func (l listing) List() ([]types.UID, error) {
	uids, err := l.CDI.List()
	l.then()
	return uids, err
}

// TestPreparedMeanwhile: a claim that is prepared on one GPU while another is observed keeps its CDI spec.
func TestPreparedMeanwhile(t *testing.T) {
	b, m := newNode(t)
	observer := b.managerWith(func(o *Options) {
		o.Specs.CDI = listing{o.Specs.CDI, sync.OnceFunc(func() { mustPrepare(t, m, newClaim("u1", sliceB0)) })}
	})
	must.Do(t, observer.cleanUpGPU(t.Context(), pciA))
	if b.spec("u1") == nil {
		t.Error("the CDI spec of a claim that was prepared meanwhile was removed")
	}
}

// modeless is a driver that knows no compute modes.
type modeless struct{ converge.Sharing }

func (modeless) Mode(context.Context, sharing.Device) (gpu.ComputeMode, error) {
	return "", gpu.ErrNotSupported
}

// TestNoComputeMode: a driver which says that there is no compute mode is believed only where none was set.
func TestNoComputeMode(t *testing.T) {
	b, m := newNode(t)
	without := b.managerWith(func(o *Options) { o.Sharing = modeless{o.Sharing} })
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustUnprepare(t, without, "u1")
	expect.Is(t, without.engine.Finish(t.Context(), m.store.Snapshot().Of("u1"), []string{pciA}), gpu.ErrNotSupported)
	expect.Is(t, without.cleanUp(t.Context()), gpu.ErrNotSupported)
	mustReconcile(t, m)
	b.wantNothing()
	wantError(t, runPrepare(t.Context(), without, newClaim("u2", mpsA)), "MPS needs a compute mode")
	b.wantNothing()
}

// TestTimeSliceAfterRestart: a process that has not set a time slice itself sets it again, also on one GPU of a claim that has all it needs
// on the other, and a repeated Prepare has its answer.
func TestTimeSliceAfterRestart(t *testing.T) {
	for _, devices := range [][]string{{turnsA}, {turnsA, sliceB0}, {sliceA0, turnsC}} {
		for _, again := range []bool{false, true} {
			b, m := newNode(t)
			mustPrepare(t, m, newClaim("u1", devices...))
			set := maps.Clone(b.intervals)
			b.locked(func() { clear(b.intervals) })
			m = b.manager()
			if again {
				mustPrepare(t, m, newClaim("u1", devices...))
			} else {
				mustReconcile(t, m)
			}
			expect.Same(t, b.intervals, set)
		}
	}
}

// TestNotLeftOver: a claim that only observes a GPU is prepared without its lock. What was seen of it may be over by then, and is not taken
// for what is left of it.
func TestNotLeftOver(t *testing.T) {
	for name, leave := range map[string]func(b *box, m *Manager){
		"being prepared": func(*box, *Manager) {},
		"being released": func(b *box, m *Manager) { _, _ = m.store.Release("u1", b.clock()) },
	} {
		t.Run(name, func(t *testing.T) {
			b, killed := newNode(t)
			claim := admin(newClaim("u1", wholeA, wholeB))
			b.hooks(nil, b.killAt("write spec")) // before the claim is noted as prepared
			expect.Is(t, runPrepare(t.Context(), killed, claim), errKilled)
			b.hooks(nil, nil)
			one := b.manager()
			leave(b, one)
			other := b.managerWith(func(o *Options) {
				o.Users = observing{o.Users, sync.OnceFunc(func() { mustPrepare(t, one, claim) })}
			})
			_ = other.cleanUpGPU(t.Context(), pciA)
			mustReconcile(t, other)
			expect.Same(t, b.state(), []string{"record of u1", "spec of u1"})
			b.wantRecord("u1", record.Prepared)
		})
	}
}

// TestReleaseUnreadable: a release that waits is not over because the records cannot be read.
func TestReleaseUnreadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m := newNode(t)
		mustPrepare(t, m, newClaim("u1", wholeA))
		b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1})
		known := must.Get(m.store.Release("u1", b.clock()))(t)
		folder := filepath.Join(b.dataDir(), "records")
		m.engine.Users = observing{m.engine.Users, func() {
			_ = errors.Join(os.Rename(folder, folder+"-aside"), os.WriteFile(folder, nil, 0o600))
		}}
		if m.engine.Finish(t.Context(), known.Of("u1"), []string{pciA}) == nil {
			t.Errorf("something is left, and it is said that nothing is: %v", b.hardware())
		}
	})
}
