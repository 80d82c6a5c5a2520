// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// TestAppliedAgain: a claim of a file that the cluster has already does not wait for itself.
func TestAppliedAgain(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	held := f.Held("team", "c", "n1", fleettest.Request(whole))
	m := &Manifest{Claims: []*resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"}, Spec: held.Spec}}}
	for _, e := range New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now).Manifest(t.Context(), m) {
		if e.Verdict != Allocated {
			t.Errorf("%s", text(t, e))
		}
	}
}
