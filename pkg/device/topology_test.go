// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/gpu"
)

// bridged is a node with eight GPUs, of which NVLink joins the first and the second, and so on. The
// first four are behind one PCIe switch, the others behind another.
func bridged(t *testing.T) *gpu.Node {
	node := replicate(loadNode(t, "h100-nvl"), 8)
	slices.Reverse(node.GPUs) // replicate has them against the order of their addresses
	for i := range node.GPUs {
		g := &node.GPUs[i]
		g.NVLink = &gpu.NVLink{GPUs: []string{node.GPUs[i^1].PCIAddress}}
		g.PCIeRoot, g.PCIeSwitch = "pci0000:16", "0000:17:00.0"
		if i >= 4 {
			g.PCIeRoot, g.PCIeSwitch = "pci0000:47", "0000:48:00.0"
		}
	}
	return node
}

// withNeighbour are the devices of one of two H100 that NVLink and a PCIe switch join.
func withNeighbour(t *testing.T) []resourceapi.Device {
	t.Helper()
	node := replicate(loadNode(t, "h100-80-sxm"), 2)
	for i := range node.GPUs {
		node.GPUs[i].NVLink = &gpu.NVLink{Switches: []string{"0000:07:00.0"}}
		node.GPUs[i].PCIeSwitch = "0000:17:00.0"
	}
	uuid := loadNode(t, "h100-80-sxm").GPUs[0].UUID
	return slices.DeleteFunc(published(t, node), func(d resourceapi.Device) bool {
		parent, _ := valueOf(d.Attributes["parentUUID"])
		return parent != uuid
	})
}

// TestGroupAttributes: whole GPUs have them, and nothing else has.
func TestGroupAttributes(t *testing.T) {
	node := bridged(t)
	node.GPUs[6].NVLink, node.GPUs[7].NVLink, node.GPUs[7].PCIeSwitch = nil, nil, ""
	want := map[string][2]string{}
	for i := range 8 {
		of := [2]string{node.GPUs[i/2*2].UUID, node.GPUs[i].PCIeSwitch}
		if i >= 6 {
			of[0] = ""
		}
		want[GPUName(node.GPUs[i].PCIAddress)] = of
	}
	others := 0
	for _, d := range published(t, node) {
		domain, _ := valueOf(d.Attributes["nvlinkDomain"])
		port, _ := valueOf(d.Attributes["pcieSwitch"])
		equal(t, d.Name, want[d.Name], [2]string{domain, port})
		for _, name := range []resourceapi.QualifiedName{"nvlinkDomain", "pcieSwitch"} {
			if a, has := d.Attributes[name]; has && *a.StringValue == "" {
				t.Errorf("%s has an empty %s: empty values match one another", d.Name, name)
			}
		}
		if _, whole := want[d.Name]; !whole {
			others++
		}
	}
	if others < 100 {
		t.Errorf("only %d devices that are not whole GPUs", others)
	}
}

// matching asks for whole GPUs that have an attribute in common.
func matching(count int64, attribute string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "together"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{request("gpu", count)}
	if attribute != "" {
		claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(attribute))}}
	}
	return claim
}

// TestAllocatorKeepsGroupsTogether: the scheduler finds GPUs that are close together, and none where
// too few of a group are free.
func TestAllocatorKeepsGroupsTogether(t *testing.T) {
	const domain, port, root = "gpu.nvidia.com/nvlinkDomain", "gpu.nvidia.com/pcieSwitch", "resource.kubernetes.io/pcieRoot"
	node := bridged(t)
	for name, test := range map[string]struct {
		held      []int
		count     int64
		attribute string
		want      []int
	}{
		"first pair":                 {nil, 2, domain, []int{0, 1}},
		"broken pair":                {[]int{0}, 2, domain, []int{2, 3}},
		"without the constraint":     {[]int{0}, 2, "", []int{1, 2}},
		"the only pair":              {[]int{0, 3, 4}, 2, domain, []int{6, 7}},
		"half of every pair":         {[]int{0, 3, 4, 7}, 2, domain, nil},
		"more than a pair":           {nil, 3, domain, nil},
		"one":                        {[]int{0}, 1, domain, []int{1}},
		"switch":                     {[]int{0}, 4, port, []int{4, 5, 6, 7}},
		"switch, too few":            {[]int{0, 4}, 4, port, nil},
		"switch, without constraint": {[]int{0, 4}, 4, "", []int{1, 2, 3, 5}},
		"root":                       {[]int{1}, 4, root, []int{4, 5, 6, 7}},
	} {
		i := inventoryOf(t, node, Terms{})
		s := newScheduler(t, i.ResourceSlices(testOptions))
		for _, n := range test.held {
			s = s.holding(GPUName(node.GPUs[n].PCIAddress))
		}
		results, err := s.allocateClaims(matching(test.count, test.attribute))
		if err != nil {
			t.Fatal(err)
		}
		var got, want []string
		for _, result := range results {
			for _, r := range result.Devices.Results {
				got = append(got, r.Device)
			}
		}
		for _, n := range test.want {
			want = append(want, GPUName(node.GPUs[n].PCIAddress))
		}
		equal(t, name, want, got)
	}
}
