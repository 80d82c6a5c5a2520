// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import "testing"

// TestPlaces: no two claims of the recording have the same memory slice at the same time,
// and only partitions of one GPU, or only shares of one kind, are on it together.
func TestPlaces(t *testing.T) {
	all, err := nodes()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range all {
		for i, a := range n.claims {
			for _, b := range n.claims[:i] {
				if a.of.GPU != b.of.GPU || !a.has(b.until) && !b.has(a.until) {
					continue
				}
				partitions := a.of.Partition != nil && b.of.Partition != nil && !a.of.Partition.Placement.Overlaps(b.of.Partition.Placement)
				if !partitions && (!a.of.Kind.IsShare() || a.of.Name != b.of.Name) {
					t.Errorf("claims %s/%s and %s/%s are in each other's way", a.namespace, a.name, b.namespace, b.name)
				}
			}
		}
	}
}
