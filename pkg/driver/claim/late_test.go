// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"testing"
	"time"
)

// TestLateRelease: a release that has arrived before the last Prepare of the claim, and gets its turn only then, is of an
// earlier pod.
func TestLateRelease(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	b.pass(time.Second)
	mustPrepare(t, m, newClaim("u1", sliceA0)) // for the next pod
	err := m.Unprepare(late, "u1")
	if b.spec("u1") == nil || b.count(pciA) == 0 {
		t.Errorf("a release from before the last Prepare took the claim's devices away: %v", err)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// TestPrepareFromBeforeSuspend: a machine is suspended while a Prepare waits for the API server, and its claim was released
// before. Whatever the kubelet has given up long ago does not prepare anything.
func TestPrepareFromBeforeSuspend(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	mustUnprepare(t, m, "u1")
	b.pass(time.Hour)
	mustReconcile(t, m)
	if _, err := m.Prepare(late, newClaim("u1", sliceA0)); err == nil {
		t.Error("a call from before the release was let through after an hour")
	}
	b.wantNothing()
}
