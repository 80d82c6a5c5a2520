// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
)

func TestReboot(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("goes", sliceA4))
	b.boot("boot-2")

	m = b.manager()
	// A spec that has survived names device numbers of the earlier boot.
	b.specs["stays"] = []cdi.Device{{Name: "stale"}}
	mustReconcile(t, m)
	if len(b.specs) != 0 || b.count(pciA) != 0 {
		t.Errorf("left or made: %v", b.state())
	}
	// The place of a claim that was not released is taken by another: that one
	// must keep it.
	mustPrepare(t, m, newClaim("new", sliceA4))
	mustUnprepare(t, m, "goes")
	if _, found := b.look(addressA4); !found {
		t.Error("the release of a claim of an earlier boot destroyed another claim's partition")
	}
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	if len(b.specs["stays"]) != 2 || b.count(pciA) != 2 {
		t.Errorf("not made again: %v", b.state())
	}
	mustUnprepare(t, m, "stays")
	mustUnprepare(t, m, "new")
	b.wantNothing()
}

func TestReconcileRewritesSpecs(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", sliceA0, wholeC))
	want := b.specs["u1"]
	b.mu.Lock()
	clear(b.specs)
	b.mu.Unlock()
	_ = b.bareManager().cleanUp(t.Context()) // it knows no GPU
	m := b.manager()
	mustReconcile(t, m)
	if diff := cmp.Diff(want, b.specs["u1"]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	b.specs["u1"] = nil
	mustReconcile(t, m)
	if diff := cmp.Diff(want, b.specs["u1"]); diff != "" {
		t.Errorf("again: -want +got:\n%s", diff)
	}
}

// A claim that a call is at work on is left to it, and does not hold up others.
func TestReconcilePassesOverCalls(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	entered, leave := make(chan struct{}), make(chan struct{})
	b.hooks(func(e string) error {
		if e == "create compute instance" {
			close(entered)
			<-leave
		}
		return nil
	}, nil)
	done := make(chan error)
	go func() {
		_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
		done <- err
	}()
	<-entered
	write(t, host.TemporaryName(m.store.Path("u2")), "{")
	for _, other := range []*Manager{m, b.manager()} {
		mustReconcile(t, other)
	}
	if diff := cmp.Diff([]string{"instance " + addressA0.String() + " complete=false", "record of u1"}, b.state()[1:]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestLeftWhileBusy: while a call keeps a GPU for long, what was left there is not said to be cleaned up.
func TestLeftWhileBusy(t *testing.T) {
	for name, other := range map[string]bool{"this process": false, "another process": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u1", sliceA0))
				b.hooks(func(e string) error {
					if e == "destroy instance" {
						return gpu.ErrInUse
					}
					return nil
				}, nil)
				mustUnprepare(t, m, "u1")
				wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1")
				locks := m.locks
				if other {
					locks = b.manager().locks
				}
				release, err := locks.GPUs(t.Context(), []string{pciA})
				if err != nil {
					t.Fatal(err)
				}
				for range 10 {
					if err := m.cleanUp(t.Context()); err == nil {
						t.Error("everything is said to be cleaned up")
					}
					if got := findings(survey(t.Context(), m)); len(got) != 1 {
						t.Errorf("taints %q", got)
					}
					time.Sleep(30 * time.Second)
				}
				release()
				b.hooks(nil, nil)
				time.Sleep(5 * time.Minute)
				mustReconcile(t, m)
				b.wantNothing()
			})
		})
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o750), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestManyOutdatedSpecs: all of them are written again in one round, however many claims observe a GPU.
func TestManyOutdatedSpecs(t *testing.T) {
	synctest.Test(t, testManyOutdatedSpecs)
}

func testManyOutdatedSpecs(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	const claims = 120
	for i := range claims {
		mustPrepare(t, m, admin(newClaim(fmt.Sprint("u", i), wholeC)))
	}
	// The driver was upgraded: all are outdated.
	b.mu.Lock()
	for uid := range b.specs {
		b.specs[uid] = nil
	}
	b.mu.Unlock()
	if err := m.cleanUpGPU(t.Context(), pciC); err != nil {
		t.Error(err)
	}
	left := 0
	b.mu.Lock()
	for _, devices := range b.specs {
		if devices == nil {
			left++
		}
	}
	b.mu.Unlock()
	if left > 0 {
		t.Errorf("%d of %d specs are not up to date", left, claims)
	}
}

// TestReconcileBehindMuteSupervisor: a supervisor that does not answer keeps no GPU from being looked after.
func TestReconcileBehindMuteSupervisor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, portion("share", mpsA, "1Gi", "10"))
		mustPrepare(t, m, newClaim("u2", sliceB0))
		failed := false
		b.beforeEffect(func(pciAddress, e string) error {
			if e == "destroy instance" && pciAddress == pciB && !failed {
				failed = true
				return &gpu.Error{Call: "nvmlGpuInstanceDestroy", PCIAddress: pciB, Text: "Insufficient memory"}
			}
			return nil
		})
		mustUnprepare(t, m, "u2")
		if b.count(pciB) != 1 {
			t.Fatal("it did not fail")
		}
		b.mu.Lock()
		b.mute = true
		b.mu.Unlock()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.cleanUp(ctx) }()
		time.Sleep(time.Hour)
		if n := b.count(pciB); n != 0 {
			t.Errorf("for an hour the MPS supervisor has not answered, and a partition of GPU B that has nothing to do with MPS is not given back")
		}
		select {
		case err := <-done:
			t.Logf("reconcile: %v", err)
			done <- err
		default:
			t.Error("Reconcile has not returned for an hour: at its start the plugin does not get ready")
		}
		cancel()
		t.Log(<-done)
	})
}

// TestOtherDevicesOfThePlace: what is said of some devices of a GPU says nothing of the others.
func TestOtherDevicesOfThePlace(t *testing.T) {
	all := device.Condition{PCIAddress: pciA, Reason: device.ReleasePending}
	undivided, partitions := all, all
	undivided.Undivided, partitions.Kind = true, device.Partition
	for _, said := range []device.Condition{undivided, partitions} {
		if got := with([]device.Condition{said}, []device.Condition{all, said}); len(got) != 2 || got[1] != all {
			t.Errorf("beside %+v: %+v", said, got)
		}
	}
}
