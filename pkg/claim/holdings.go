// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Holding is a device that a prepared claim has, or a share of one, with what is known of it
// without asking the hardware. Those that a claim only observes are none.
type Holding struct {
	Claim Ref
	// Device is the published name. Several shares of one device are one holding.
	Device     string
	PCIAddress string
	// Kind is how the claim has the device: alone, or which kind of share.
	Kind device.Kind
	// Partition is nil for a GPU and for shares of one.
	Partition *HeldPartition
	// UUID is that of the GPU, or of the partition while it exists.
	UUID string
	// MemoryLimitBytes is what can be had at most: the memory of the device, or a share's
	// limit, which MPS applies to each process of the claim. 0 is no limit.
	MemoryLimitBytes int64
}

// HeldPartition is the partition that a claim has, or has a share of.
type HeldPartition struct {
	gpu.PartitionID

	Profile   string
	Placement gpu.Placement
}

// Numbers of journal records by what they say.
const (
	RecordsPreparing   = string(journal.Preparing)
	RecordsPrepared    = string(journal.Prepared)
	RecordsUnpreparing = string(journal.Unpreparing)
	// RecordsEarlier are of another boot of the machine.
	RecordsEarlier = "earlier"
	// RecordsUnreadable are damaged or of another version.
	RecordsUnreadable = "unreadable"
)

// RecordStates are all keys of Holdings.Records.
func RecordStates() []string {
	return []string{RecordsPreparing, RecordsPrepared, RecordsUnpreparing, RecordsEarlier, RecordsUnreadable}
}

// Holdings are what claims have on this node.
type Holdings struct {
	Held []Holding
	// GPUs are the PCI addresses of all GPUs, with claims and without.
	GPUs []string
	// Records counts the records of the journal by their state.
	Records map[string]int
}

// Holdings reads the journal.
func (m *Manager) Holdings() (Holdings, error) {
	snapshot, err := m.store.Snapshot()
	if err != nil {
		return Holdings{}, err
	}
	all := Holdings{Records: map[string]int{RecordsEarlier: len(snapshot.Earlier), RecordsUnreadable: len(snapshot.Unreadable)}}
	inventory := m.inventory.Load()
	if inventory != nil {
		all.GPUs = inventory.PCIAddresses()
	}
	for _, r := range snapshot.Records {
		all.Records[string(r.State)]++
		if r.State != journal.Prepared {
			continue
		}
		for i := range r.Devices {
			if !r.Devices[i].Admin {
				all.add(holdingOf(r, &r.Devices[i], inventory))
			}
		}
	}
	return all, nil
}

// add joins shares of one device that a claim has.
func (all *Holdings) add(h Holding) {
	for i := range all.Held {
		other := &all.Held[i]
		if other.Claim != h.Claim || other.Device != h.Device {
			continue
		}
		if h.MemoryLimitBytes == 0 || other.MemoryLimitBytes == 0 {
			other.MemoryLimitBytes = 0
		} else {
			other.MemoryLimitBytes += h.MemoryLimitBytes
		}
		return
	}
	all.Held = append(all.Held, h)
}

func holdingOf(r *journal.Record, d *journal.Device, inventory *device.Inventory) Holding {
	h := Holding{Claim: r.Claim, Device: d.Device, PCIAddress: d.PCIAddress, Kind: d.Type}
	if d.Type == journal.Static {
		h.Kind = device.Partition
	}
	var published device.Device
	if inventory != nil {
		published, _ = inventory.Lookup(d.Device)
	}
	var memory uint64
	if published.GPU != nil {
		h.UUID, memory = published.GPU.UUID, published.GPU.Resources.MemoryBytes
	}
	if p := d.Partition; p != nil {
		h.UUID, memory = p.LiveUUID(), 0
		h.Partition = &HeldPartition{Profile: p.Profile, Placement: p.Placement}
		if p.Live != nil {
			h.Partition.PartitionID = gpu.PartitionID{InstanceID: p.Live.InstanceID, ComputeID: p.Live.ComputeID, UUID: p.Live.UUID}
		}
		if published.Partition != nil {
			memory = published.Partition.Profile.Resources.MemoryBytes
		}
	}
	switch {
	case !d.IsShare():
		h.MemoryLimitBytes = int64(memory) // #nosec G115 -- at most 2^44
	case d.Sharing != nil && (d.Type == device.MPS || d.Limited()):
		h.MemoryLimitBytes = d.Sharing.Limits.MemoryBytes
	}
	return h
}
