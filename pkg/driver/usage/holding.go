// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
)

// Holding is a device that a prepared claim has, or a share of one, as metrics name it. Its
// labels stay what they are when the hardware changes below the claim.
type Holding struct {
	Claim claim.Ref
	// Device is the published name. Several shares of one device are one holding.
	Device     string
	PCIAddress string
	Kind       device.Kind
	// Partition is nil for a GPU and for shares of one.
	Partition *claim.LivePartition
	// UUID is that of the GPU, or of the partition, also when that is gone.
	UUID string
	// MemoryLimitBytes is what can be had at most: the memory of the device, or a share's
	// limit, which MPS applies to each process of the claim. 0 is no limit.
	MemoryLimitBytes int64
	// Held says that the driver holds the claim's containers to that.
	Held bool
}

// holdingsOf lists what claims have, without what they only observe.
func holdingsOf(live []claim.LiveClaim) []Holding {
	var all []Holding
	for _, c := range live {
		first := len(all)
		for i := range c.Devices {
			d := &c.Devices[i]
			if d.Admin {
				continue
			}
			same := slices.IndexFunc(all[first:], func(h Holding) bool { return h.Device == d.Device })
			if same < 0 {
				all = append(all, holdingOf(c.Claim, d))
			} else {
				all[first+same].join(memoryLimit(d))
			}
		}
	}
	return all
}

func holdingOf(ref claim.Ref, d *claim.LiveDevice) Holding {
	h := Holding{
		Claim: ref, Device: d.Device, PCIAddress: d.PCIAddress, Kind: d.Kind, Partition: d.Partition, UUID: d.GPU,
		MemoryLimitBytes: memoryLimit(d), Held: d.Limits != nil && d.Limits.Held,
	}
	if d.Partition != nil {
		h.UUID = d.Partition.UUID
	}
	return h
}

func memoryLimit(d *claim.LiveDevice) int64 {
	switch {
	case !d.Kind.IsShare():
		return int64(d.Resources.MemoryBytes)
	case d.Limits != nil:
		return d.Limits.MemoryBytes
	}
	return 0
}

// join adds another share of the device. Without a limit of one there is none.
func (h *Holding) join(limit int64) {
	if limit == 0 || h.MemoryLimitBytes == 0 {
		h.MemoryLimitBytes = 0
	} else {
		h.MemoryLimitBytes += limit
	}
}
