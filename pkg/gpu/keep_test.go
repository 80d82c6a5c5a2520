// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
)

// TestKeeping: GPUs that are missing stay as they were, and the others are as they
// are now.
func TestKeeping(t *testing.T) {
	node := func(version string, minor int, addresses ...string) *Node {
		n := &Node{DriverVersion: version}
		for _, address := range addresses {
			n.GPUs = append(n.GPUs, GPU{PCIAddress: address, Minor: minor})
		}
		return n
	}
	const a, b, c, long = "0000:1b:00.0", "0000:28:00.0", "0000:35:00.0", "10000:01:00.0"
	earlier, now := node("580", 1, a, b, long), node("590", 2, b, c)
	now.Broken = []Broken{{PCIAddress: a}}
	all, kept := now.Keeping(earlier)
	expect.Same(t, kept, []string{a, long}, "kept")
	want := &Node{DriverVersion: "590", Broken: now.Broken, GPUs: []GPU{
		{PCIAddress: a, Minor: 1}, {PCIAddress: b, Minor: 2}, {PCIAddress: c, Minor: 2}, {PCIAddress: long, Minor: 1},
	}}
	expect.Same(t, all, want, "GPUs")
	if len(now.GPUs) != 2 || len(earlier.GPUs) != 3 {
		t.Error("a node changed")
	}
	for name, earlier := range map[string]*Node{"none": nil, "itself": now, "empty": {}} {
		if all, kept := now.Keeping(earlier); len(kept) > 0 || len(all.GPUs) != 2 {
			t.Errorf("%s: kept %v", name, kept)
		}
	}
	if rest := all.Without(a, c); !cmp.Equal(rest, &Node{DriverVersion: "590", Broken: now.Broken, GPUs: []GPU{{PCIAddress: b, Minor: 2}, {PCIAddress: long, Minor: 1}}}) || len(all.GPUs) != 4 {
		t.Errorf("without two: %+v", rest)
	}
}

// TestKeepingMovedGPU: a GPU that was put into another slot is not there twice. What may
// be allocated of the old slot stays.
func TestKeepingMovedGPU(t *testing.T) {
	const a, b = "0000:1b:00.0", "0000:28:00.0"
	earlier := &Node{GPUs: []GPU{{PCIAddress: a, UUID: "GPU-x", Minor: 1}, {PCIAddress: b, UUID: "GPU-y", Minor: 2}}}
	for name, test := range map[string]struct{ now, want []GPU }{
		"swapped":                   {[]GPU{{PCIAddress: a, UUID: "GPU-y"}, {PCIAddress: b, UUID: "GPU-x"}}, []GPU{{PCIAddress: a, UUID: "GPU-y"}, {PCIAddress: b, UUID: "GPU-x"}}},
		"swapped, one is not found": {[]GPU{{PCIAddress: a, UUID: "GPU-y"}}, []GPU{{PCIAddress: a, UUID: "GPU-y"}, {PCIAddress: b, Minor: 2}}},
		"another one":               {[]GPU{{PCIAddress: a, UUID: "GPU-z"}}, []GPU{{PCIAddress: a, UUID: "GPU-z"}, {PCIAddress: b, UUID: "GPU-y", Minor: 2}}},
	} {
		all, _ := (&Node{GPUs: test.now}).Keeping(earlier)
		expect.Same(t, all.GPUs, test.want, name)
	}
	expect.Equal(t, earlier.GPUs[1].UUID, "GPU-y", "the earlier node changed")
}

// TestKeepingReservedMemory: what a GPU reserves neither goes nor shrinks because of what
// the GPU is used for now.
func TestKeepingReservedMemory(t *testing.T) {
	const a = "0000:1b:00.0"
	for name, test := range map[string]struct{ earlier, now, want GPU }{
		"MIG is on":   {GPU{UUID: "GPU-x", ReservedBytes: 551}, GPU{UUID: "GPU-x"}, GPU{UUID: "GPU-x", ReservedBytes: 551}},
		"less":        {GPU{UUID: "GPU-x", ReservedBytes: 551}, GPU{UUID: "GPU-x", ReservedBytes: 550}, GPU{UUID: "GPU-x", ReservedBytes: 551}},
		"more":        {GPU{UUID: "GPU-x", ReservedBytes: 551}, GPU{UUID: "GPU-x", ReservedBytes: 600}, GPU{UUID: "GPU-x", ReservedBytes: 600}},
		"another GPU": {GPU{UUID: "GPU-x", ReservedBytes: 551}, GPU{UUID: "GPU-y", ReservedBytes: 500}, GPU{UUID: "GPU-y", ReservedBytes: 500}},
	} {
		test.earlier.PCIAddress, test.now.PCIAddress, test.want.PCIAddress = a, a, a
		now := &Node{GPUs: []GPU{test.now}}
		all, kept := now.Keeping(&Node{GPUs: []GPU{test.earlier}})
		if diff := cmp.Diff([]GPU{test.want}, all.GPUs); diff != "" || len(kept) > 0 {
			t.Errorf("%s: kept %v (-want +got):\n%s", name, kept, diff)
		}
		expect.Same(t, now.GPUs[0], test.now, name, "the node changed")
	}
}

// TestKeepingNVLink: what the links lead to is not forgotten because MIG mode hides it.
func TestKeepingNVLink(t *testing.T) {
	on, off := &MIG{Enabled: true}, &MIG{}
	to := func(gpu string) *NVLink { return &NVLink{GPUs: []string{gpu}} }
	for name, test := range map[string]struct {
		earlier, now GPU
		want         *NVLink
	}{
		"MIG is on":      {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-x", MIG: on}, to("a")},
		"MIG is off":     {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-x", MIG: off}, nil},
		"no MIG":         {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-x"}, nil},
		"read again":     {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-x", MIG: off, NVLink: to("b")}, to("b")},
		"read though on": {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-x", MIG: on, NVLink: to("b")}, to("b")},
		"another GPU":    {GPU{UUID: "GPU-x", NVLink: to("a")}, GPU{UUID: "GPU-y", MIG: on}, nil},
	} {
		test.earlier.PCIAddress, test.now.PCIAddress = "0000:01:00.0", "0000:01:00.0"
		all, _ := (&Node{GPUs: []GPU{test.now}}).Keeping(&Node{GPUs: []GPU{test.earlier}})
		expect.Same(t, all.GPUs[0].NVLink, test.want, name)
	}
}
