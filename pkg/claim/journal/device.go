// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Device is one device of a claim, or one share of a device.
type Device struct {
	// Requests are the names of the requests, or "request/subrequest", that the
	// device was allocated for.
	Requests []string   `json:"requests"`
	Pool     string     `json:"pool"`
	Device   string     `json:"device"`
	ShareID  *types.UID `json:"shareID,omitempty"`
	Admin    bool       `json:"adminAccess,omitempty"`
	// Type is a kind of package device, or Static.
	Type device.Kind `json:"type"`
	// PCIAddress is the identity of the GPU. Its minor number moves at every boot
	// and is looked up when it is needed.
	PCIAddress string `json:"pciAddress"`
	// DynamicMIG allows the GPU's MIG mode to follow the claims.
	DynamicMIG bool `json:"dynamicMIG,omitempty"`
	// Divisible means that the GPU can have MIG mode, so that a whole one must not.
	Divisible bool `json:"divisible,omitempty"`
	// Partition is nil for a whole GPU.
	Partition *Partition `json:"partition,omitempty"`
	// Sharing is nil where nothing is done to share the device.
	Sharing *Sharing `json:"sharing,omitempty"`
	// CDIDevice is the qualified name, empty until the spec is written.
	CDIDevice string `json:"cdiDevice,omitempty"`
}

// Partition is where a partition is and what it became.
type Partition struct {
	// Profile is the profile's name, for people.
	Profile   string        `json:"profile"`
	ProfileID uint32        `json:"profileID"`
	Placement gpu.Placement `json:"placement"`
	// Live is nil until the partition exists, and again once it is known to be gone.
	Live *partition.Live `json:"live,omitempty"`
	// UUID is the one that the claim's partition must have: that of a static one, or
	// that of a partition which has gone. It is empty where any will do.
	UUID string `json:"uuid,omitempty"`
	// Remaking means that a partition which has gone may have been made again. It has
	// another UUID if its GPU instance has another ID.
	Remaking bool `json:"remaking,omitempty"`
}

// Sharing is what is done to share a device.
type Sharing struct {
	// UUID is the GPU's.
	UUID string `json:"uuid"`
	// Session is the ID of the MPS session that the device is in, or empty.
	Session string `json:"session,omitempty"`
	// Limits are the claim's, of a share.
	Limits Limits `json:"limits,omitzero"`
	// Interval is the time slice that the GPU has for the claim, or empty.
	Interval sharing.Interval `json:"interval,omitempty"`
	// Limited means that an interposer library holds the claim to its limits.
	Limited bool `json:"limited,omitempty"`
	// OnClientKilled is what the policy asked for when the share was prepared, or empty.
	OnClientKilled policy.OnClientKilled `json:"onClientKilled,omitempty"`
	// ClientPriority is that of the claim's clients in a session that claims share. Empty
	// is normal.
	ClientPriority policy.ClientPriority `json:"clientPriority,omitempty"`
}

// Limits are what one claim may use of a share. Zero is no limit.
type Limits struct {
	// Percent is of the multiprocessors, 1 to 100.
	Percent int `json:"percent,omitempty"`
	// MemoryBytes is device memory.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// Key names the device, or the share of it, within the claim.
func (d *Device) Key() string {
	if d.ShareID == nil {
		return d.Device
	}
	return d.Device + "-" + string(*d.ShareID)
}

// Address returns where the partition is. The device must be one.
func (d *Device) Address() partition.Address {
	return partition.Address{PCIAddress: d.PCIAddress, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement}
}

// Owned reports whether the device is, or is in, a partition that this driver made
// for claims, and has to remove.
func (d *Device) Owned() bool { return d.Partition != nil && d.Type != Static && !d.Admin }

// IsShare reports whether other claims can have the device as well.
func (d *Device) IsShare() bool { return d.Type.IsShare() }

// In reports whether the device is in the MPS session.
func (d *Device) In(session string) bool {
	return d.Sharing != nil && session != "" && d.Sharing.Session == session
}

// Limited reports whether an interposer library limits the device's processes.
func (d *Device) Limited() bool { return d.Sharing != nil && d.Sharing.Limited }

// Interval returns the time slice that is set for the claim, or nothing.
func (d *Device) Interval() sharing.Interval {
	if d.Sharing == nil {
		return ""
	}
	return d.Sharing.Interval
}

// DropInterval notes that the time slice is not the claim's any more.
func (d *Device) DropInterval() {
	if d.Sharing != nil {
		d.Sharing.Interval = ""
		d.dropEmptySharing()
	}
}

func (d *Device) dropEmptySharing() {
	if d.Sharing.Session == "" && d.Sharing.Interval == "" && !d.Sharing.Limited {
		d.Sharing = nil
	}
}

// LiveUUID returns the UUID of the partition while it exists, or nothing.
func (p *Partition) LiveUUID() string {
	if p == nil || p.Live == nil {
		return ""
	}
	return p.Live.UUID
}

// OwnUUID returns the UUID without which a partition at the address is not the
// claim's. It is empty where the address alone decides, because a process may have
// died between making the partition and writing down its UUID.
func (p *Partition) OwnUUID() string {
	switch {
	case p == nil:
		return ""
	case p.Live != nil:
		return p.Live.UUID
	case p.Remaking:
		return ""
	}
	return p.UUID
}

// Gone reports whether the claim had a partition that does not exist any more.
func (p *Partition) Gone() bool { return p != nil && p.Live == nil && p.UUID != "" }

// At reports whether an instance is in the place of the device.
func (d *Device) At(i gpu.Instance) bool {
	return d.Partition != nil && d.Partition.ProfileID == i.ProfileID && d.Partition.Placement == i.Placement
}

// MayBe reports whether an instance in the device's place is the claim's: one with
// another UUID was made by somebody else, after the GPU was reset. One with the same
// UUID may have been, too, see gpu.ComputeInstance.
func (d *Device) MayBe(i gpu.Instance) bool {
	own := d.Partition.OwnUUID()
	return own == "" || len(i.Compute) == 0 || len(i.Compute) == 1 && i.Compute[0].UUID == own
}

// IsIn reports whether the device's partition is among the instances of its GPU.
// One that was not made yet, as far as the record knows, is found by its place.
func (d *Device) IsIn(instances []gpu.Instance) bool {
	return slices.ContainsFunc(instances, func(i gpu.Instance) bool {
		if uuid := d.Partition.LiveUUID(); uuid != "" {
			return len(i.Compute) == 1 && i.Compute[0].UUID == uuid
		}
		return d.At(i) && d.MayBe(i)
	})
}

// Overlaps reports whether two devices use the same part of a GPU. Admin access
// uses nothing, and shares of one device are meant to be together.
func (d *Device) Overlaps(other *Device) bool {
	switch {
	case d.PCIAddress != other.PCIAddress || d.Admin || other.Admin:
		return false
	case d.Device == other.Device && d.ShareID != nil && other.ShareID != nil:
		return *d.ShareID == *other.ShareID
	case d.Partition == nil || other.Partition == nil:
		return true
	}
	return d.Partition.Placement.Overlaps(other.Partition.Placement)
}

// SamePlace reports whether both are the same GPU or partition.
func (d *Device) SamePlace(other *Device) bool {
	if d.Partition == nil || other.Partition == nil {
		return d.PCIAddress == other.PCIAddress && d.Partition == nil && other.Partition == nil
	}
	return d.Address() == other.Address()
}

// same reports whether both mean the same device, whatever has become of it.
func (d *Device) same(other *Device) bool {
	if d.Device != other.Device || d.Pool != other.Pool || d.PCIAddress != other.PCIAddress || d.Admin != other.Admin || d.Type != other.Type ||
		!ptr.Equal(d.ShareID, other.ShareID) || (d.Partition == nil) != (other.Partition == nil) {
		return false
	}
	return d.Partition == nil || d.Address() == other.Address()
}
