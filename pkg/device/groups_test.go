// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

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
		equal(t, name, want, GroupsOf(&gpu.Node{GPUs: test.gpus}))
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
	equal(t, "groups", want, GroupsOf(node))
}
