// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
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

// TestMemoryErrorsAreReadAtOnce: whether memory waits for a reset is known as soon as an XID says
// that something was remapped or retired; errors of programs ask nothing.
func TestMemoryErrorsAreReadAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newFakeHardware()
		s := newStation(t, t.TempDir(), h)
		defer s.end()
		h.set(func() { h.health[pciA] = gpu.Health{PageRetirementPending: true} })
		s.send(pciA, 31, -1)
		s.send(pciA, 174, -1)
		s.want(t, "errors of programs", "")
		s.send(pciA, 63, -1)
		s.want(t, "a page is retired", "row-remap-pending None")
	})
}

// TestFabricPending: a GPU that registers with its fabric for longer than a minute is not handed
// out, until it has.
func TestFabricPending(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newFakeHardware()
		h.set(func() { h.health[pciA] = gpu.Health{FabricPending: "In Progress"} })
		s := newStation(t, t.TempDir(), h)
		defer s.end()
		time.Sleep(55 * time.Second)
		s.want(t, "less than a minute", "")
		time.Sleep(10 * time.Second)
		s.want(t, "a minute", "fabric-unhealthy NoSchedule")
		time.Sleep(24 * time.Hour)
		s.want(t, "for ever", "fabric-unhealthy NoSchedule")
		h.set(func() { h.health[pciA] = gpu.Health{} })
		time.Sleep(10 * time.Second)
		s.want(t, "registered", "")
	})
}
