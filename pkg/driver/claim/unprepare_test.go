// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Pods end while the driver is gone, and the rest follows when it is back.
func TestUnprepareWithoutDriver(t *testing.T) {
	for name, absent := range map[string]error{
		"driver not loaded": gpu.ErrDriverNotLoaded,
		"GPU lost":          gpu.ErrLost,
		"GPU not there":     gpu.ErrNotFound,
		"GPU to be reset":   gpu.ErrResetRequired,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			mustPrepare(t, b.manager(), newClaim("u1", sliceA0))
			mustPrepare(t, b.manager(), newClaim("u2", wholeC))
			m := b.bareManager()
			b.hooks(func(e string) error {
				if e == "destroy instance" {
					return &gpu.Error{Call: "nvmlInit_v2", Text: "no", Err: absent}
				}
				return nil
			}, nil)
			mustUnprepare(t, m, "u1")
			mustUnprepare(t, m, "u2")
			if len(b.specs) != 0 {
				t.Errorf("specs are left: %v", b.specs)
			}
			if err := m.cleanUp(t.Context()); !errors.Is(err, absent) {
				t.Errorf("reconcile without driver: got %v", err)
			}
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			if err := b.manager().cleanUp(t.Context()); err != nil {
				t.Errorf("reconcile with driver: %v", err)
			}
			b.wantNothing()
		})
	}
}

// A release that cannot even begin with a GPU succeeds. In another boot, in which nothing tells of
// that call any more, its record is still one of a claim that is to be released.
func TestUnprepareOfBusyGPUThenReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", sliceA0))
		release, err := b.manager().locks.GPUs(t.Context(), []string{pciA})
		if err != nil || release == nil {
			t.Fatalf("GPU %s: not free, %v", pciA, err)
		}
		mustUnprepare(t, m, "u1")
		release()
		b.boot("boot-2")
		m = b.manager()
		mustReconcile(t, m)
		if r, err := m.store.Read("u1"); err != nil || r != nil {
			t.Errorf("the record is left: %+v, %v", r, err)
		}
	})
}

func TestUnprepareFails(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
	held := &gpu.Error{Call: "nvmlGpuInstanceDestroy", PCIAddress: pciA, Text: "Insufficient memory"}
	failed := false
	b.beforeEffect(func(pciAddress, e string) error {
		if e == "destroy instance" && pciAddress == pciA && !failed {
			failed = true
			return held
		}
		return nil
	})
	mustUnprepare(t, m, "u1") // it is written down
	if n := b.count(pciA) + b.count(pciB); n != 1 {
		t.Errorf("one failure kept the other partition: %v", b.state())
	}
	mustReconcile(t, m)
	b.wantNothing()
}

// One of two partitions on a GPU is in use: the other one is given back.
func TestUnprepareGoesOn(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceA4))
	live, _ := b.look(addressA4)
	b.run(pciA, gpu.Process{PID: 1, InstanceID: live.InstanceID})
	mustUnprepare(t, m, "u1")
	if n := b.count(pciA); n != 1 {
		t.Errorf("left: %v", b.state())
	}
}
