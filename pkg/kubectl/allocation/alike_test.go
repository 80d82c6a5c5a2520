// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation_test

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestLikeAsAlone: whatever groups nodes, the answer about each is that of the allocator about this node alone.
func TestLikeAsAlone(t *testing.T) {
	const root = "resource.kubernetes.io/pcieRoot"
	for name, c := range map[string]struct {
		change func(*fleettest.Fleet, *resourceapi.Device)
		claim  func(*fleettest.Fleet) *resourceapi.ResourceClaim
	}{
		"an attribute that no device of the second has": {
			func(_ *fleettest.Fleet, d *resourceapi.Device) { delete(d.Attributes, root) },
			func(f *fleettest.Fleet) *resourceapi.ResourceClaim {
				claim := f.Claim("a", "c", fleettest.Request(whole))
				claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(root))}}
				return claim
			},
		},
		"a share, and a claim that has the same device alone": {
			func(f *fleettest.Fleet, d *resourceapi.Device) {
				if d.AllowMultipleAllocations == nil {
					return
				}
				for _, node := range []string{"n1", "n2"} {
					held := f.Claim("a", node, fleettest.Request(mps))
					r := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: fleettest.Driver, Pool: node, Device: d.Name}
					if node == "n1" {
						r.ShareID = new(types.UID("00000000-0000-0000-0000-000000000001"))
					}
					held.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{r}}}
				}
			},
			func(f *fleettest.Fleet) *resourceapi.ResourceClaim {
				return f.Claim("a", "c", fleettest.Share(mps, "1Gi", "10"))
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 1)
			f.AddNode("n2", "h100-80-sxm", 1)
			for _, s := range f.Slices {
				for i := range s.Spec.Devices {
					if *s.Spec.NodeName == "n2" {
						c.change(f, &s.Spec.Devices[i])
					}
				}
			}
			claims := one(c.claim(f))
			planner := allocation.New(f.Snapshot).Within(patient)
			verdicts := map[allocation.Verdict]bool{}
			for i, together := range planner.OnNodes(t.Context(), f.Nodes, claims) {
				alone := planner.OnNode(t.Context(), f.Nodes[i], claims)
				if verdicts[alone.Verdict] = true; together.Verdict != alone.Verdict {
					t.Errorf("%s: %s like %s, and by itself %s", together.Node, together.Verdict, together.Like, alone.Verdict)
				}
			}
			if len(verdicts) != 2 {
				t.Errorf("the nodes do not differ: %v", verdicts)
			}
		})
	}
}
