// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import "testing"

// TestPlaces: no two claims of the recording have the same memory slice at the same time,
// and only partitions of one GPU, or only shares of one kind, are on it together.
func TestPlaces(t *testing.T) {
	all := claims(gpus())
	for i, a := range all {
		if a.gpu == nil {
			t.Fatalf("claim %s/%s has no GPU", a.namespace, a.name)
		}
		for _, b := range all[:i] {
			together := a.gpu == b.gpu && a.since > b.until && b.since > a.until
			overlap := a.first < b.first+b.slices && b.first < a.first+a.slices
			if together && (a.kind != b.kind || a.kind == "gpu" || a.kind == "mig" && overlap) {
				t.Errorf("claims %s/%s and %s/%s are in each other's way", a.namespace, a.name, b.namespace, b.name)
			}
		}
	}
}
