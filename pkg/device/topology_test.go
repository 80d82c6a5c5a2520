// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
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
		expect.Same(t, [2]string{domain, port}, want[d.Name], d.Name)
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
		results := must.Get(s.allocateClaims(matching(test.count, test.attribute)))(t)
		var got, want []string
		for _, result := range results {
			for _, r := range result.Devices.Results {
				got = append(got, r.Device)
			}
		}
		for _, n := range test.want {
			want = append(want, GPUName(node.GPUs[n].PCIAddress))
		}
		expect.Same(t, got, want, name)
	}
}

// gpuAt is a GPU at "0000:0<n>:00.0" with the UUID "GPU-<n>".
func gpuAt(n int, link *gpu.NVLink) gpu.GPU {
	return gpu.GPU{PCIAddress: addressOf(n), UUID: fmt.Sprint("GPU-", n), NVLink: link}
}

func addressOf(n int) string { return fmt.Sprintf("0000:%02x:00.0", n) }

// to has links to GPUs.
func to(gpus ...int) *gpu.NVLink {
	link := &gpu.NVLink{}
	for _, n := range gpus {
		link.GPUs = append(link.GPUs, addressOf(n))
	}
	return link
}

// by has links to NVSwitches.
func by(switches ...string) *gpu.NVLink { return &gpu.NVLink{Switches: switches} }

func TestNVLinkDomains(t *testing.T) {
	inClique := func(name string) *gpu.NVLink { return &gpu.NVLink{Clique: name} }
	for name, test := range map[string]struct {
		gpus []gpu.GPU
		want map[int]string
	}{
		"no NVLink":           {[]gpu.GPU{gpuAt(1, nil), gpuAt(2, nil)}, nil},
		"links that are down": {[]gpu.GPU{gpuAt(1, to()), gpuAt(2, to())}, nil},
		"pairs":               {[]gpu.GPU{gpuAt(1, to(2)), gpuAt(2, to(1)), gpuAt(3, to(4)), gpuAt(4, to(3))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-3", 4: "GPU-3"}},
		"across":              {[]gpu.GPU{gpuAt(4, to(1)), gpuAt(3, to(2)), gpuAt(2, to(3)), gpuAt(1, to(4))}, map[int]string{1: "GPU-1", 4: "GPU-1", 2: "GPU-2", 3: "GPU-2"}},
		"one side tells":      {[]gpu.GPU{gpuAt(1, to()), gpuAt(2, to(1))}, map[int]string{1: "GPU-1", 2: "GPU-1"}},
		"a pair and one":      {[]gpu.GPU{gpuAt(1, to()), gpuAt(2, to(3)), gpuAt(3, to(2))}, map[int]string{2: "GPU-2", 3: "GPU-2"}},
		"all to all":          {[]gpu.GPU{gpuAt(1, to(2, 3)), gpuAt(2, to(1, 3)), gpuAt(3, to(1, 2))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-1"}},
		"a chain":             {[]gpu.GPU{gpuAt(1, to(2)), gpuAt(2, to(1, 3)), gpuAt(3, to(2))}, nil},
		"switches":            {[]gpu.GPU{gpuAt(1, by("a", "b")), gpuAt(2, by("a", "b")), gpuAt(3, by("a", "b"))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-1"}},
		"two sets of switches": {
			[]gpu.GPU{gpuAt(1, by("a")), gpuAt(2, by("b")), gpuAt(3, by("a")), gpuAt(4, by("b"))},
			map[int]string{1: "GPU-1", 3: "GPU-1", 2: "GPU-2", 4: "GPU-2"},
		},
		"unknown switches":   {[]gpu.GPU{gpuAt(1, by(gpu.UnknownSwitch)), gpuAt(2, by(gpu.UnknownSwitch))}, map[int]string{1: "GPU-1", 2: "GPU-1"}},
		"the peer is broken": {[]gpu.GPU{gpuAt(1, to(2))}, nil},
		"two at a third":     {[]gpu.GPU{gpuAt(1, to(3)), gpuAt(2, to(3))}, nil},
		"cliques":            {[]gpu.GPU{gpuAt(1, inClique("c.1")), gpuAt(2, inClique("c.2")), gpuAt(3, inClique("c.1"))}, map[int]string{1: "c.1", 2: "c.2", 3: "c.1"}},
		"clique and switch":  {[]gpu.GPU{gpuAt(1, inClique("c.1")), gpuAt(2, by("a")), gpuAt(3, by("a"))}, map[int]string{1: "c.1", 2: "GPU-2", 3: "GPU-2"}},
		"elsewhere now":      {[]gpu.GPU{{PCIAddress: addressOf(1), NVLink: to(2)}, gpuAt(2, to(1))}, nil},
	} {
		want := map[string]Groups{}
		for n, domain := range test.want {
			want[addressOf(n)] = Groups{NVLinkDomain: domain}
		}
		expect.Same(t, GroupsOf(&gpu.Node{GPUs: test.gpus}), want, name)
	}
}

// TestPCIeSwitchGroups: a switch that no other GPU shares says nothing about GPUs.
func TestPCIeSwitchGroups(t *testing.T) {
	node := &gpu.Node{GPUs: []gpu.GPU{gpuAt(1, to(2)), gpuAt(2, to(1)), gpuAt(3, nil), gpuAt(4, nil), gpuAt(5, nil)}}
	for i, port := range []string{"x", "y", "y", "", ""} {
		node.GPUs[i].PCIeSwitch = port
	}
	want := map[string]Groups{
		addressOf(1): {NVLinkDomain: "GPU-1"}, addressOf(2): {NVLinkDomain: "GPU-1", PCIeSwitch: "y"}, addressOf(3): {PCIeSwitch: "y"},
	}
	expect.Same(t, GroupsOf(node), want, "groups")
}
