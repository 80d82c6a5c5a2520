// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"testing"

	"github.com/partage-dev/partage/test/scale/slices/reference"
)

// mostJSON is how large the slices of a DGX H100 may be.
const mostJSON = 205_000

// TestSizeOfReferenceDriver compares with what NVIDIA's DRA driver (v0.5, feature gate
// DynamicMIG) publishes for the same node. What Partage publishes by default is
// smaller, although it has shares in addition.
func TestSizeOfReferenceDriver(t *testing.T) {
	node := replicate(loadNode(t, "h100-80-sxm"), 8)
	theirs := sizeOf(t, reference.Pool{Driver: sizeOptions.Driver, Node: sizeOptions.NodeName}.ResourceSlices(node))
	if want := 8 * (1 + 25); theirs.devices != want || theirs.slices != 9 {
		t.Fatalf("%d devices in %d slices, want %d in 9", theirs.devices, theirs.slices, want)
	}
	for _, p := range sizedPolicies {
		p.terms.ExtendedResources = true
		own := sizeOf(t, inventoryOf(t, node, p.terms).ResourceSlices(sizeOptions))
		percent := func(own, theirs int) string {
			return fmt.Sprintf("%d of %d (%d %%)", own, theirs, 100*own/theirs)
		}
		t.Logf("%s: protobuf %s, JSON %s, decoded %s", p.name,
			percent(own.stored, theirs.stored), percent(own.sent, theirs.sent), percent(own.decoded, theirs.decoded))
		// With variants there are as many partitions as the reference driver has, and shares
		// and observers besides.
		if p.name != "default + variants" && (own.stored >= theirs.stored || own.sent >= theirs.sent) {
			t.Errorf("%s: larger than the reference driver's", p.name)
		}
		// What a new attribute costs is bytes in every API server: something else has to go.
		if p.name == "default" && own.sent > mostJSON {
			t.Errorf("%d bytes of JSON", own.sent)
		}
	}
}
