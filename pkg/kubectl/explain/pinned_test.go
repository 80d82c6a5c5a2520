// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestPinned: a GPU that a claim names by its UUID is found on the node that has it, and the claim that holds it there is in the way, although other
// nodes look the same.
func TestPinned(t *testing.T) {
	f := fleettest.New(t)
	for _, node := range []string{"n1", "n2", "n3"} {
		f.AddNode(node, "h100-80-sxm", 1)
		f.Held("a", node, node, fleettest.Request(whole))
	}
	pinned := fmt.Sprintf("device.attributes['%s'].uuid == '%s'", fleettest.Driver, fleettest.GPUOf("n3", 0))
	claim := f.Claim("team", "c", fleettest.Request(whole, pinned))
	e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Claim(t.Context(), claim)
	if len(e.Reasons) != 1 || e.Reasons[0].Cause != Held || len(e.InTheWay) != 1 || e.InTheWay[0].Node != "n3" {
		t.Errorf("%+v\n%s", e.Reasons, text(t, e))
	}
}
