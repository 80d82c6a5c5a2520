// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestOfAnotherNamespace: who may read one namespace does not know what is missing in another, which a file may be for.
func TestOfAnotherNamespace(t *testing.T) {
	for namespace, want := range map[string]Verdict{"team": Waits, "other": Unknown} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Namespace = "team"
		for _, r := range []string{fleet.ResourceClaims, fleet.ResourceTemplates, fleet.ResourcePods} {
			f.Missing = append(f.Missing, fleet.Missing{Resource: r, Err: errors.New("forbidden")})
		}
		claim := f.Claim(namespace, "c", fleettest.Request(whole))
		f.Claims = nil
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pod(namespace, "p", fleettest.Uses(claim)))
		if e.Verdict != want {
			t.Errorf("%s: %s, want %s\n%s", namespace, e.Verdict, want, text(t, e))
		}
	}
}
