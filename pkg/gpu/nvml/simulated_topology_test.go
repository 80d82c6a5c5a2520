// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// groupsOf discovers a machine and returns the groups of its GPUs, in their order.
func groupsOf(t *testing.T, c *Client) []device.Groups {
	t.Helper()
	node, err := c.Discover(t.Context())
	if err != nil || len(node.Broken) > 0 {
		t.Fatalf("%+v, %v", node, err)
	}
	groups := device.GroupsOf(node)
	var all []device.Groups
	for i := range node.GPUs {
		all = append(all, groups[node.GPUs[i].PCIAddress])
	}
	return all
}

func same(n int, g device.Groups) []device.Groups { return slices.Repeat([]device.Groups{g}, n) }

// TestSimulatedGroups: which GPUs of the catalogue's machines are close together.
func TestSimulatedGroups(t *testing.T) {
	for name, want := range map[string]func(uuids []string) []device.Groups{
		"dgx-h100": func(uuids []string) []device.Groups { return same(8, device.Groups{NVLinkDomain: uuids[0]}) },
		"dgx-b200": func(uuids []string) []device.Groups { return same(8, device.Groups{NVLinkDomain: uuids[0]}) },
		"dgx-a100": func(uuids []string) []device.Groups {
			all := same(8, device.Groups{NVLinkDomain: uuids[0]})
			for i, upstream := range []string{"0000:01:00.0", "0000:41:00.0", "0000:81:00.0", "0000:b1:00.0"} {
				all[2*i].PCIeSwitch, all[2*i+1].PCIeSwitch = upstream, upstream
			}
			return all
		},
		"gb200-node": func([]string) []device.Groups {
			return same(4, device.Groups{NVLinkDomain: "2b6ed3a4-9f5c-4f7e-8c13-6a0b7d21e958.32766"})
		},
		"h100-nvl-pairs": func(uuids []string) []device.Groups {
			var all []device.Groups
			for i := range 8 {
				all = append(all, device.Groups{
					NVLinkDomain: uuids[i/2*2], PCIeSwitch: map[bool]string{false: "0000:17:00.0", true: "0000:98:00.0"}[i >= 4],
				})
			}
			return all
		},
		"l4x4":  func([]string) []device.Groups { return same(4, device.Groups{}) },
		"mixed": func([]string) []device.Groups { return same(6, device.Groups{}) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, name)
			var uuids []string
			for i := range m.GPUs {
				uuids = append(uuids, m.GPUs[i].UUID)
			}
			c, file := simulate(t, m)
			expect.Same(t, groupsOf(t, c), want(uuids), "groups")
			expect.Len(t, fatal.Get(file.Unmodelled())(t), 0, "functions that the simulated library does not have")
		})
	}
}

// TestSimulatedNVLinkTrouble: GPUs whose links tell nothing are discovered like any others.
func TestSimulatedNVLinkTrouble(t *testing.T) {
	every := func(change func(*machine.GPU)) func(*machine.Machine) {
		return func(m *machine.Machine) {
			for i := range m.GPUs {
				change(&m.GPUs[i])
			}
		}
	}
	fails := func(function string) func(*machine.Machine) {
		return func(m *machine.Machine) {
			state.AddFault(m, machine.Fault{Function: function, GPU: -1, Code: int(nvml.ERROR_UNKNOWN)})
		}
	}
	for name, test := range map[string]struct {
		machine string
		change  func(*machine.Machine)
		groups  bool
	}{
		"well":               {"gb200-node", func(*machine.Machine) {}, true},
		"no fabric function": {"h100-nvl-pairs", fails("nvmlDeviceGetGpuFabricInfoV"), false},
		"fabric in progress": {"gb200-node", every(func(g *machine.GPU) { g.Health.Fabric.State = nvml.GPU_FABRIC_STATE_IN_PROGRESS }), false},
		"fabric failed":      {"dgx-h100", every(func(g *machine.GPU) { g.Health.Fabric.Status = int(nvml.ERROR_TIMEOUT) }), false},
		"no fabric":          {"dgx-h100", every(func(g *machine.GPU) { g.Health.Fabric.State = 0 }), true},
		"links down": {"dgx-h100", every(func(g *machine.GPU) {
			for i := range g.NVLinks {
				g.NVLinks[i].Down = true
			}
		}), false},
		"one link down": {"h100-nvl-pairs", every(func(g *machine.GPU) { g.NVLinks[0].Down = true }), true},
		"state fails":   {"dgx-h100", fails("nvmlDeviceGetNvLinkState"), false},
		"type fails":    {"dgx-h100", fails("nvmlDeviceGetNvLinkRemoteDeviceType"), false},
		"address fails": {"h100-nvl-pairs", fails("nvmlDeviceGetNvLinkRemotePciInfo_v2"), false},
		"second address is refused": {"dgx-h100", func(m *machine.Machine) {
			for i := range m.GPUs {
				state.AddFault(m, machine.Fault{Function: "nvmlDeviceGetNvLinkRemotePciInfo_v2", GPU: i, Skip: 1, Code: int(nvml.ERROR_INVALID_ARGUMENT)})
			}
		}, false},
		"switches invisible": {"dgx-h100", every(func(g *machine.GPU) { hideEnds(g) }), true},
		"MIG is on":          {"dgx-h100", every(func(g *machine.GPU) { g.MIG.Current, g.MIG.Pending = true, true }), false},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, test.machine)
			test.change(m)
			c, _ := simulate(t, m)
			for i, g := range groupsOf(t, c) {
				expect.Equal(t, (g.NVLinkDomain != ""), test.groups, "GPU", i, "is in", g)
			}
		})
	}
}

func hideEnds(g *machine.GPU) {
	for i := range g.NVLinks {
		g.NVLinks[i].Remote = ""
	}
}

// TestSimulatedNVLinkOnce: links are read until they say something, and then no more, also while
// MIG mode hides them.
func TestSimulatedNVLinkOnce(t *testing.T) {
	m := newMachine(t, "dgx-h100")
	for i := range m.GPUs {
		m.GPUs[i].Health.Fabric.State = nvml.GPU_FABRIC_STATE_IN_PROGRESS
	}
	c, file := simulate(t, m)
	update := func(change func(*machine.GPU)) {
		t.Helper()
		update(t, file, func(m *machine.Machine) {
			for i := range m.GPUs {
				change(&m.GPUs[i])
			}
		})
	}
	wants := func(when string, want device.Groups) {
		t.Helper()
		expect.Same(t, groupsOf(t, c), same(8, want), when)
	}
	wants("before the registration", device.Groups{})
	update(func(g *machine.GPU) { g.Health.Fabric.State = nvml.GPU_FABRIC_STATE_COMPLETED })
	domain := device.Groups{NVLinkDomain: m.GPUs[0].UUID}
	wants("registered", domain)
	before := fatal.Get(file.Calls())(t)
	update(func(g *machine.GPU) { g.MIG.Current, g.MIG.Pending = true, true })
	wants("MIG is on", domain)
	after, err := file.Calls()
	if err != nil || after["nvmlDeviceGetNvLinkState"] != before["nvmlDeviceGetNvLinkState"] {
		t.Errorf("links are read again: %v", err)
	}
}
