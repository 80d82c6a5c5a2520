// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"maps"
	"slices"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestReleaseOfUnkillableMPS checks that a release is answered in time where the daemon of a session cannot be killed, as one whose server hangs in a
// call of the kernel module.
func TestReleaseOfUnkillableMPS(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t)
	p.Ready(t)
	c := n.Allocate(t, []harness.Device{{Kind: harness.MPS}})
	ids := p.MustPrepare(t, c)
	n.StartProgram(t, ids...).Kill() // there is a server from now on
	running, err := n.MPSProcesses()
	if err != nil || len(running) == 0 {
		t.Fatalf("processes of MPS: %v, %v", running, err)
	}
	thaw := harness.Freeze(t, slices.Collect(maps.Keys(running))...)
	if err := p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout); err != nil {
		t.Errorf("MPS cannot be killed, and the pod cannot end: %v", err)
	}
	thaw()
	p.UntilClean(t, n)
}
