// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// gpuAt is a GPU at "0000:0<n>:00.0" with the UUID "GPU-<n>".
func gpuAt(n int, link *NVLink) GPU {
	return GPU{PCIAddress: at(n), UUID: fmt.Sprint("GPU-", n), NVLink: link}
}

func at(n int) string { return fmt.Sprintf("0000:%02x:00.0", n) }

// to has links to GPUs.
func to(gpus ...int) *NVLink {
	link := &NVLink{}
	for _, n := range gpus {
		link.GPUs = append(link.GPUs, at(n))
	}
	return link
}

// by has links to NVSwitches.
func by(switches ...string) *NVLink { return &NVLink{Switches: switches} }

func TestNVLinkDomains(t *testing.T) {
	inClique := func(name string) *NVLink { return &NVLink{Clique: name} }
	for name, test := range map[string]struct {
		gpus []GPU
		want map[int]string
	}{
		"no NVLink":           {[]GPU{gpuAt(1, nil), gpuAt(2, nil)}, nil},
		"links that are down": {[]GPU{gpuAt(1, to()), gpuAt(2, to())}, nil},
		"pairs":               {[]GPU{gpuAt(1, to(2)), gpuAt(2, to(1)), gpuAt(3, to(4)), gpuAt(4, to(3))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-3", 4: "GPU-3"}},
		"across":              {[]GPU{gpuAt(4, to(1)), gpuAt(3, to(2)), gpuAt(2, to(3)), gpuAt(1, to(4))}, map[int]string{1: "GPU-1", 4: "GPU-1", 2: "GPU-2", 3: "GPU-2"}},
		"one side tells":      {[]GPU{gpuAt(1, to()), gpuAt(2, to(1))}, map[int]string{1: "GPU-1", 2: "GPU-1"}},
		"a pair and one":      {[]GPU{gpuAt(1, to()), gpuAt(2, to(3)), gpuAt(3, to(2))}, map[int]string{2: "GPU-2", 3: "GPU-2"}},
		"all to all":          {[]GPU{gpuAt(1, to(2, 3)), gpuAt(2, to(1, 3)), gpuAt(3, to(1, 2))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-1"}},
		"a chain":             {[]GPU{gpuAt(1, to(2)), gpuAt(2, to(1, 3)), gpuAt(3, to(2))}, nil},
		"switches":            {[]GPU{gpuAt(1, by("a", "b")), gpuAt(2, by("a", "b")), gpuAt(3, by("a", "b"))}, map[int]string{1: "GPU-1", 2: "GPU-1", 3: "GPU-1"}},
		"two sets of switches": {
			[]GPU{gpuAt(1, by("a")), gpuAt(2, by("b")), gpuAt(3, by("a")), gpuAt(4, by("b"))},
			map[int]string{1: "GPU-1", 3: "GPU-1", 2: "GPU-2", 4: "GPU-2"},
		},
		"unknown switches":   {[]GPU{gpuAt(1, by(UnknownSwitch)), gpuAt(2, by(UnknownSwitch))}, map[int]string{1: "GPU-1", 2: "GPU-1"}},
		"the peer is broken": {[]GPU{gpuAt(1, to(2))}, nil},
		"two at a third":     {[]GPU{gpuAt(1, to(3)), gpuAt(2, to(3))}, nil},
		"cliques":            {[]GPU{gpuAt(1, inClique("c.1")), gpuAt(2, inClique("c.2")), gpuAt(3, inClique("c.1"))}, map[int]string{1: "c.1", 2: "c.2", 3: "c.1"}},
		"clique and switch":  {[]GPU{gpuAt(1, inClique("c.1")), gpuAt(2, by("a")), gpuAt(3, by("a"))}, map[int]string{1: "c.1", 2: "GPU-2", 3: "GPU-2"}},
		"elsewhere now":      {[]GPU{{PCIAddress: at(1), NVLink: to(2)}, gpuAt(2, to(1))}, nil},
	} {
		want := map[string]Groups{}
		for n, domain := range test.want {
			want[at(n)] = Groups{NVLinkDomain: domain}
		}
		if diff := cmp.Diff(want, (&Node{GPUs: test.gpus}).Groups()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestPCIeSwitchGroups: a switch that no other GPU shares says nothing about GPUs.
func TestPCIeSwitchGroups(t *testing.T) {
	node := &Node{GPUs: []GPU{gpuAt(1, to(2)), gpuAt(2, to(1)), gpuAt(3, nil), gpuAt(4, nil), gpuAt(5, nil)}}
	for i, port := range []string{"x", "y", "y", "", ""} {
		node.GPUs[i].PCIeSwitch = port
	}
	want := map[string]Groups{
		at(1): {NVLinkDomain: "GPU-1"}, at(2): {NVLinkDomain: "GPU-1", PCIeSwitch: "y"}, at(3): {PCIeSwitch: "y"},
	}
	if diff := cmp.Diff(want, node.Groups()); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}
