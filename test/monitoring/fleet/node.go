// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/partage-dev/partage/pkg/device"
	journal "github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

// node is a node with what it publishes.
type node struct {
	name      string
	inventory *device.Inventory
	claims    []held
	// published is how many ResourceSlices there are.
	published int
}

// held is a claim with its device.
type held struct {
	*claim
	of device.Device
}

// nodes are all, with GPUs as they are in the catalogue of models.
func nodes() ([]*node, error) {
	var all []*node
	for _, m := range machines {
		facts := &gpu.Node{}
		for _, bus := range m.buses {
			board, err := boards.Load(m.board)
			if err != nil {
				return nil, err
			}
			g := board.GPUs[0]
			g.PCIAddress = address(bus)
			g.UUID = uuid("GPU-", m.node+g.PCIAddress)
			if slices.Contains(m.mig, bus) {
				g.MIG.Enabled = true
			}
			board.GPUs = append(facts.GPUs, g)
			facts = board
		}
		inventory, err := device.NewInventory(facts, device.Terms{})
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", m.node, err)
		}
		n := &node{name: m.node, inventory: inventory, published: len(inventory.ResourceSlices(device.Options{
			Driver: "gpu.nvidia.com", Pool: m.node, NodeName: m.node, PartitionableDevices: true, ConsumableCapacity: true,
		}))}
		for i := range claims {
			c := &claims[i]
			if c.node != n.name {
				continue
			}
			name := strings.TrimSuffix(device.GPUName(address(c.bus))+"-"+c.device, "-")
			d, ok := inventory.Lookup(name)
			if !ok {
				return nil, fmt.Errorf("claim %s: node %s has no device %s", c.name, n.name, name)
			}
			n.claims = append(n.claims, held{c, d})
		}
		all = append(all, n)
	}
	return all, nil
}

func address(bus string) string { return "0000:" + bus + ":00.0" }

// collector makes the metrics of GPUs and claims at a time before the end, as the driver does.
func (n *node) collector(before time.Duration) prometheus.Collector {
	m := metrics.New(metrics.Options{Usage: func() usage.Snapshot { return n.snapshot(before) }, XIDs: []uint64{lostXID}})
	m.SetGPUs(n.inventory, device.Status{})
	for _, at := range n.inventory.PCIAddresses() {
		var health gpu.Health
		switch {
		case at == lostGPU && before <= lostFor:
			status := device.Status{Conditions: []device.Condition{
				{PCIAddress: at, Reason: device.Lost},
				{PCIAddress: at, Reason: device.XID, Value: fmt.Sprint(lostXID), Effect: xid.Lookup(lostXID).Effect},
			}}
			m.SetGPUs(n.inventory.With(status), status)
			m.XID(at, lostXID)
			continue
		case at == hotGPU && before <= hotFor:
			status := device.Status{Conditions: []device.Condition{{PCIAddress: at, Reason: device.Throttled, Effect: policy.EffectNone}}}
			m.SetGPUs(n.inventory.With(status), status)
			health.Throttling = []gpu.Throttling{gpu.ThrottlingHardwareThermal}
		}
		m.SetHealth(at, health, nil)
		if at == programGPU {
			// The first one was long ago: a counter that begins with 1 has not increased.
			m.XID(at, programXID)
			if before <= programFor {
				m.XID(at, programXID)
			}
		}
	}
	return m.Collector()
}

// snapshot is what is measured.
func (n *node) snapshot(before time.Duration) usage.Snapshot {
	s := usage.Snapshot{
		GPUs: map[string]usage.GPU{}, Records: map[string]int{"prepared": 0, "unreadable": 0}, Sessions: map[mps.Phase]int{},
	}
	for _, at := range n.inventory.PCIAddresses() {
		if at == lostGPU && before <= lostFor {
			continue
		}
		used := &gpu.Usage{}
		if mig := n.inventory.GPU(at).MIG; mig == nil || !mig.Enabled {
			used.Utilization = new(float64)
		}
		shared := false
		for i := range n.claims {
			c := &n.claims[i]
			if c.of.GPU.PCIAddress != at || !c.has(before) {
				continue
			}
			one := c.measured(before)
			s.Claims = append(s.Claims, one)
			used.UsedBytes += *one.MemoryBytes
			switch {
			case c.of.Partition != nil:
				used.Utilization = nil
			case used.Utilization != nil:
				*used.Utilization += *one.Utilization
			}
			shared = shared || c.of.Kind == device.MPS
		}
		if shared {
			s.Sessions[mps.Running]++
		}
		s.GPUs[at] = usage.GPU{Sampled: End.Add(-before), Usage: used}
	}
	s.Records["prepared"] = len(s.Claims)
	return s
}

// measured is what the driver knows of a claim.
func (c *held) measured(before time.Duration) usage.Claim {
	memory := c.of.GPU.Resources.MemoryBytes
	u := usage.Claim{Holding: usage.Holding{
		Device: c.of.Name, PCIAddress: c.of.GPU.PCIAddress, Kind: c.of.Kind, UUID: c.of.GPU.UUID,
	}}
	u.Claim.Namespace, u.Claim.Name = c.namespace, c.name
	if p := c.of.Partition; p != nil {
		memory = p.Profile.Resources.MemoryBytes
		u.UUID = uuid("MIG-", c.node+c.of.Name+c.name)
		u.Partition = &journal.LivePartition{Profile: p.Profile.Name, Placement: p.Placement}
	}
	if c.of.Kind.IsShare() {
		memory = uint64(c.requested * gib)
	}
	if c.of.Kind != device.TimeSlice {
		u.MemoryLimitBytes = int64(memory)
	}
	u.RequestedBytes = new(int64(memory))
	u.MemoryBytes = new(uint64(float64(memory) * min(c.memory*wave(c.name, before), 1)))
	u.PeakBytes = new(uint64(float64(memory) * min(c.memory*1.1, 1)))
	u.Processes, u.Pods = new(1), []string{c.name}
	u.Idle = new(max(0, c.idle-before))
	// GPM, which tells how busy a partition is, is there from Hopper on.
	if c.of.Partition == nil || c.of.GPU.Architecture == "Hopper" {
		u.Utilization = new(0.0)
		if before >= c.idle {
			*u.Utilization = min(c.sm*wave(c.name+" sm", before), 1)
		}
	}
	return u
}
