// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import "testing"

// TestKnowsExtendedResources: by the version, however a distribution writes it, and never by a guess.
func TestKnowsExtendedResources(t *testing.T) {
	for kubelet, want := range map[string]bool{
		"v1.34.0": false, "v1.35.9": false, "v1.35.12-gke.1100": false, "v1.36.0": true, "v1.36.0-eks-3025e55": true,
		"v1.36.2+k3s1": true, "1.37.1": true, "v2.0.0": true,
	} {
		if got, err := KnowsExtendedResources(kubelet); err != nil || got != want {
			t.Errorf("%s: got %t, %v, want %t", kubelet, got, err, want)
		}
	}
	for _, kubelet := range []string{"", "unknown", "v", "v1.x"} {
		if got, err := KnowsExtendedResources(kubelet); err == nil || got {
			t.Errorf("%q: got %t, %v, want an error", kubelet, got, err)
		}
	}
}

// TestExtendedResourcesAttribute: all devices that a pod can have by a resource have it where the kubelet knows them, and none
// elsewhere.
func TestExtendedResourcesAttribute(t *testing.T) {
	seen := map[Kind]int{}
	for _, b := range testBoards(t) {
		for _, knows := range []bool{false, true} {
			terms := everything
			terms.ExtendedResources = knows
			for _, object := range inventoryOf(t, b.node, terms).ResourceSlices(testOptions) {
				for _, d := range object.Spec.Devices {
					kind := Kind(*d.Attributes["type"].StringValue)
					seen[kind]++
					attribute, has := d.Attributes[ExtendedResources]
					if has != (knows && kind != Observer) || has && (attribute.BoolValue == nil || !*attribute.BoolValue) {
						t.Errorf("%s, known %t: %s has %v", b.name, knows, d.Name, attribute)
					}
				}
			}
		}
	}
	if len(seen) != 5 {
		t.Errorf("only %v", seen)
	}
}
