// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestRecoveryActionOfXID: an XID asks the driver what it wants, at once, and what it says counts, also
// after a restart.
func TestRecoveryActionOfXID(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir, h := t.TempDir(), newFakeHardware()
		h.set(func() {
			h.health[pciA] = gpu.Health{RecoveryAction: gpu.RecoveryNone}
			h.health[pciB] = gpu.Health{RecoveryAction: gpu.RecoveryNone}
		})
		s := newStation(t, dir, h)
		time.Sleep(2 * readPause)
		s.send(pciA, 95, -1)
		s.want(t, "nothing is wanted", "xid=95 None")
		h.set(func() { h.health[pciB] = gpu.Health{RecoveryAction: gpu.RecoveryReset} })
		s.send(pciB, 95, -1)
		s.want(t, "a reset is wanted", "xid=95 None; recovery-required=reset NoSchedule on "+pciB+"; xid=95 NoExecute on "+pciB)
		s.end()

		h.set(func() { h.hang[pciA], h.hang[pciB] = true, true })
		s = newStation(t, dir, h)
		s.want(t, "after a restart, before an answer", "xid=95 None; recovery-required=reset NoSchedule on "+pciB+"; xid=95 NoExecute on "+pciB)
		s.end()
	})
}

// TestFailedReading: one that does not say what the driver wants changes nothing, however it fails.
func TestFailedReading(t *testing.T) {
	t.Parallel()
	for _, err := range []error{gpu.ErrVersionMismatch, gpu.ErrDriverNotLoaded, gpu.ErrUnknown, gpu.ErrTimeout, gpu.ErrInUse, errors.New("another")} {
		t.Run(err.Error(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, h *fakeHardware) {
				answers := func() { h.health[pciA], h.errs[pciA] = gpu.Health{RecoveryAction: gpu.RecoveryNone}, nil }
				h.set(answers)
				s := newStation(t, t.TempDir(), h)
				time.Sleep(5 * time.Second)
				s.send(pciA, 95, -1)
				s.want(t, "nothing is wanted", "xid=95 None")
				h.set(func() { h.health[pciA], h.errs[pciA] = gpu.Health{}, err })
				time.Sleep(15 * time.Second)
				s.want(t, "a reading fails", "xid=95 None")
				h.set(answers)
			})
		})
	}
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.set(func() { h.hang[pciA] = true })
		s := newStation(t, t.TempDir(), h)
		s.send(pciA, 95, -1)
		s.want(t, "before the first answer", "xid=95 NoSchedule")
		time.Sleep(time.Hour)
		if got := s.shows(); strings.Contains(got, "NoExecute") {
			t.Errorf("a GPU that has never answered: %s", got)
		}
	})
}

// TestReadingsArePaced: the first event is followed by a reading at once, many by one a second,
// whatever they are.
func TestReadingsArePaced(t *testing.T) {
	t.Parallel()
	for _, xid := range []uint64{31, 63, 999} {
		inBubble(t, func(t *testing.T, h *fakeHardware) {
			s := newStation(t, t.TempDir(), h)
			time.Sleep(5 * time.Second)
			reads := func() (n int) {
				h.set(func() { n = h.reads[pciA] })
				return n
			}
			before := reads()
			s.send(pciA, xid, -1)
			if got := reads() - before; got != 1 {
				t.Errorf("XID %d: %d readings at once", xid, got)
			}
			for range 6000 {
				s.send(pciA, xid, -1)
				time.Sleep(10 * time.Millisecond)
			}
			if got := reads() - before; got < 50 || got > 62 {
				t.Errorf("XID %d, 100 times a second: %d readings in a minute", xid, got)
			}
		})
	}
}

// TestMemoryErrorsAreReadAtOnce: whether memory waits for a reset is known as soon as an XID says
// that something was remapped or retired.
func TestMemoryErrorsAreReadAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		s := newStation(t, t.TempDir(), h)
		time.Sleep(5 * time.Second)
		h.set(func() { h.health[pciA] = gpu.Health{RepairPending: true} })
		s.send(pciA, 63, -1)
		s.want(t, "a page is retired", "row-remap-pending None")
	})
}

// TestFabricOfPartitionedGPU: while there are partitions the driver does not register the GPU, which neither
// begins nor ends anything; when they are gone it is asked in MIG mode, too.
func TestFabricOfPartitionedGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.set(func() { h.health[pciA] = gpu.Health{FabricPending: "In Progress"} })
		s := newStation(t, t.TempDir(), h)
		time.Sleep(70 * time.Second)
		s.want(t, "whole", "fabric-unhealthy NoSchedule")
		if !s.Conditions()[0].Undivided {
			t.Error("it keeps partitions from being used, which need no fabric")
		}
		h.set(func() { h.health[pciA], h.states[pciA] = gpu.Health{}, partitioned("MIG-1") })
		time.Sleep(time.Hour)
		s.want(t, "partitioned", "fabric-unhealthy NoSchedule")
		h.set(func() { h.states[pciA], h.fabric[pciA] = partitioned(), "Not Started" })
		time.Sleep(time.Hour)
		s.want(t, "without partitions, and not registered", "fabric-unhealthy NoSchedule")
		h.set(func() { h.fabric[pciA] = "" })
		time.Sleep(15 * time.Second)
		s.want(t, "without partitions, and registered", "")
	})
}
