// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// LiveClaim is a prepared claim with its devices as they are. It is what all others know of what claims have: answers to the
// kubelet, conditions, statuses, metadata and metrics follow from it.
type LiveClaim struct {
	Claim   Ref
	Devices []LiveDevice
}

// LiveDevice is a device of a prepared claim, with what is only known while it lives.
type LiveDevice struct {
	Requests []string
	Pool     string
	Device   string
	ShareID  *types.UID
	// CDIDevice is the qualified name by which containers get it.
	CDIDevice string
	// Admin marks a device that the claim only observes.
	Admin      bool
	Kind       device.Kind
	PCIAddress string
	// GPU is the UUID of the GPU; empty while the GPU is not known.
	GPU string
	// Partition is nil where the device spans its GPU.
	Partition *LivePartition
	// Limits are nil where nothing limits the claim to a part of the device.
	Limits *LiveLimits
	// Session is nil without MPS.
	Session *LiveSession
	// Interval is the time slice that the GPU has for the claim, or empty.
	Interval sharing.Interval
	// Resources are what the device has, before any limit. They are zero while the GPU is not known.
	Resources gpu.Resources
	// Attributes are those with which the device is published, if it is.
	Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
}

// LivePartition is a MIG partition of a claim.
type LivePartition struct {
	// PartitionID is what the partition has had since it was last made.
	gpu.PartitionID

	Profile   string
	Placement gpu.Placement
	// Gone says that it does not exist any more; its ids may be another one's now.
	Gone bool
}

// LiveLimits are what a claim may use of a device. Zero is no limit.
type LiveLimits struct {
	MemoryBytes int64
	// Held says that the driver holds each container to MemoryBytes.
	Held bool
	// Percent is of the multiprocessors, as the claim has asked for it.
	Percent int
	// Multiprocessors are what the hardware makes of that, where MPS does; otherwise zero.
	Multiprocessors int
}

// LiveSession is the MPS session that a device is in.
type LiveSession struct {
	ID string
	// Running says that it was not found to be gone.
	Running bool
	// Losses is how often its clients had lost their server when that was last read.
	Losses int
	// Priority is that of the claim's clients, as long as they do not set their own.
	Priority policy.ClientPriority
}

// UUID is that of the partition or GPU; empty while there is none or it is not known.
func (d *LiveDevice) UUID() string {
	switch {
	case d.Partition == nil:
		return d.GPU
	case d.Partition.Gone:
		return ""
	}
	return d.Partition.UUID
}

// Live lists the prepared claims with their devices. With an error there may be more.
func (m *Manager) Live() ([]LiveClaim, error) {
	var claims []LiveClaim
	snapshot := m.store.Snapshot()
	for _, r := range snapshot.Records {
		if r.State == record.Prepared {
			claims = append(claims, LiveClaim{Claim: r.Claim, Devices: m.live(r)})
		}
	}
	return claims, snapshot.Err
}

// live describes the devices of a record. What it says of the hardware is what was written down: it asks nothing.
func (m *Manager) live(r *record.Record) []LiveDevice {
	devices := make([]LiveDevice, len(r.Devices))
	for i := range r.Devices {
		d, one := &r.Devices[i], &devices[i]
		shared := d.Shared()
		*one = LiveDevice{
			Requests: d.Requests, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, CDIDevice: d.CDIDevice, Admin: d.Admin,
			Kind: d.Type, PCIAddress: d.PCIAddress, GPU: shared.UUID, Interval: shared.Interval,
		}
		if d.Type == record.Static {
			one.Kind = device.Partition
		}
		one.describe(m.devices())
		if p := d.Partition; p != nil {
			one.Partition = &LivePartition{Profile: p.Profile, Placement: p.Placement, Gone: p.Made == nil || d.Mark == record.Lost}
			if p.Made != nil {
				one.Partition.PartitionID = *p.Made
			}
		}
		one.share(m.devices().GPU(d.PCIAddress), &shared, r.Session(shared.Session))
	}
	return devices
}

// describe adds what the inventory knows of the device.
func (d *LiveDevice) describe(inventory *device.Inventory) {
	known, found := inventory.Lookup(d.Device)
	if !found {
		return
	}
	// The record does not tell an observer from a GPU.
	d.Kind, d.GPU, d.Resources = known.Kind, known.GPU.UUID, known.GPU.Resources
	if known.Partition != nil {
		d.Resources = known.Partition.Profile.Resources
	}
	d.Attributes = inventory.AttributesOf(d.Device)
}

// share adds how the device, which is of a GPU that may not be known, is shared, with an MPS session or without.
func (d *LiveDevice) share(g *gpu.GPU, sharing *record.Sharing, s *record.Session) {
	limits := sharing.Limits
	switch {
	case s == nil && !sharing.Limited && sharing.GuaranteedBytes == 0:
		return // time slices alone limit nothing
	case s != nil:
		priority := sharing.ClientPriority
		if !s.Shared {
			priority, limits = s.ClientPriority, record.Limits{Percent: s.Percent}
			for _, in := range s.Devices {
				if in.Device == d.Device {
					limits.MemoryBytes = in.MemoryBytes
				}
			}
		}
		const mebibyte = 1 << 20 // MPS counts in these, the rest is cut off
		limits.MemoryBytes -= limits.MemoryBytes % mebibyte
		d.Session = &LiveSession{ID: s.ID, Running: s.Running(), Losses: s.Losses, Priority: cmp.Or(priority, policy.PriorityNormal)}
	}
	if limits == (record.Limits{}) {
		return
	}
	d.Limits = &LiveLimits{MemoryBytes: limits.MemoryBytes, Held: sharing.GuaranteedBytes > 0, Percent: limits.Percent}
	if s != nil && limits.Percent > 0 && g != nil {
		d.Limits.Multiprocessors = g.MPSMultiprocessors(d.Resources.Multiprocessors, limits.Percent)
	}
}
