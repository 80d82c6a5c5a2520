// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

const (
	recordVersion = "journal.partage.dev/v1"
	// sharingVersion is that of records with something shared. It has a version
	// of its own because a driver that does not know about it must refuse the record;
	// it would leave what was done for it behind.
	sharingVersion = "journal.partage.dev/v2"
	recordKind     = "ClaimRecord"
)

// State is how far a claim has come.
type State string

const (
	// Preparing means that some of the devices may exist.
	Preparing State = "preparing"
	// Prepared means that all of it is there.
	Prepared State = "prepared"
	// Unpreparing means that some of the devices may be gone, and all have to go.
	Unpreparing State = "unpreparing"
)

// static is the type of a partition that somebody else made: it is used as it is
// and neither made nor destroyed. It has a type of its own because a version that
// does not know it must refuse the record; it would destroy the partition.
const static device.Kind = "mig-static"

// Record is the content of a journal file. Within a version, fields are only
// added; what an older version did not write reads as the zero value, which must
// mean what that version did.
type Record struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Claim      Ref    `json:"claim"`
	State      State  `json:"state"`
	// BootID is the kernel's at the time of the preparation. MIG instances do
	// not survive a reboot, so with another id nothing of it exists.
	BootID  string         `json:"bootID"`
	Devices []DeviceRecord `json:"devices"`
	// Sessions are the MPS sessions that devices are in.
	Sessions []SessionRecord `json:"sessions,omitempty"`
}

// DeviceRecord is one device of a claim.
type DeviceRecord struct {
	Requests []string   `json:"requests"`
	Pool     string     `json:"pool"`
	Device   string     `json:"device"`
	ShareID  *types.UID `json:"shareID,omitempty"`
	Admin    bool       `json:"adminAccess,omitempty"`
	// Type is one of package device, or static.
	Type device.Kind `json:"type"`
	// PCIAddress is the identity of the GPU. Its minor number is not kept: it is
	// looked up when it is needed.
	PCIAddress string `json:"pciAddress"`
	// DynamicMIG tells whether the GPU's MIG mode may follow the claims.
	DynamicMIG bool `json:"dynamicMIG,omitempty"`
	// Partition is nil for a whole GPU.
	Partition *PartitionRecord `json:"partition,omitempty"`
	// Sharing is nil where nothing is done to share the device.
	Sharing *SharingRecord `json:"sharing,omitempty"`
	// CDIDevice is the qualified name, empty until the spec is written.
	CDIDevice string `json:"cdiDevice,omitempty"`
}

// PartitionRecord is where a partition is and what it became.
type PartitionRecord struct {
	// Profile is the profile's name, for people.
	Profile   string        `json:"profile"`
	ProfileID uint32        `json:"profileID"`
	Placement gpu.Placement `json:"placement"`
	// Live is nil until the partition exists.
	Live *partition.Live `json:"live,omitempty"`
}

// uuid is empty until the partition exists.
func (p *PartitionRecord) uuid() string {
	if p == nil || p.Live == nil {
		return ""
	}
	return p.Live.UUID
}

// address must be called for partitions only.
func (d *DeviceRecord) address() partition.Address {
	return partition.Address{PCIAddress: d.PCIAddress, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement}
}

// made tells whether the device is, or is in, a partition that this driver made
// for the claim, and has to remove.
func (d *DeviceRecord) made() bool { return d.Partition != nil && d.Type != static && !d.Admin }

// releasable tells whether there is anything to undo on the hardware.
func (d *DeviceRecord) releasable() bool { return d.made() || d.Sharing != nil }

// isShare tells whether other claims can have the device as well.
func (d *DeviceRecord) isShare() bool { return d.Type == device.MPS || d.Type == device.TimeSlice }

// name is unique in the claim.
func (d *DeviceRecord) name() string {
	if d.ShareID == nil {
		return d.Device
	}
	return d.Device + "-" + string(*d.ShareID)
}

// overlaps tells whether two devices use the same part of a GPU. Admin access
// uses nothing, and shares of one device are meant to be together.
func (d *DeviceRecord) overlaps(other *DeviceRecord) bool {
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

// same tells whether two records of a device mean the same device, whatever has
// become of it.
func (d *DeviceRecord) same(other *DeviceRecord) bool {
	if d.Device != other.Device || d.Pool != other.Pool || d.PCIAddress != other.PCIAddress || d.Admin != other.Admin || d.Type != other.Type ||
		!ptr.Equal(d.ShareID, other.ShareID) || (d.Partition == nil) != (other.Partition == nil) {
		return false
	}
	return d.Partition == nil || d.address() == other.address()
}

// arrange puts the devices into the order of the other record's, if they are the
// same ones; versions of the driver may order them differently.
func (r *Record) arrange(other *Record) bool {
	if len(r.Devices) != len(other.Devices) {
		return false
	}
	var arranged []DeviceRecord
	for i := range other.Devices {
		found := slices.IndexFunc(r.Devices, func(d DeviceRecord) bool { return d.same(&other.Devices[i]) })
		if found < 0 {
			return false
		}
		arranged = append(arranged, r.Devices[found])
	}
	r.Devices = arranged
	return true
}

func (r *Record) clone() *Record {
	copied := *r
	copied.Devices = slices.Clone(r.Devices)
	copied.Sessions = slices.Clone(r.Sessions)
	for i := range copied.Sessions {
		copied.Sessions[i].Devices = slices.Clone(copied.Sessions[i].Devices)
	}
	for i := range copied.Devices {
		if p := copied.Devices[i].Partition; p != nil {
			copied.Devices[i].Partition = ptr.To(*p)
		}
		if s := copied.Devices[i].Sharing; s != nil {
			copied.Devices[i].Sharing = ptr.To(*s)
		}
	}
	return &copied
}

// errOtherVersion marks a record that is not damaged, but not for this program.
var errOtherVersion = errors.New("written by another version of the driver")

// parseRecord is strict about what it relies on and indifferent to fields that
// it does not know.
func parseRecord(data []byte, uid types.UID) (*Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if (r.APIVersion != recordVersion && r.APIVersion != sharingVersion) || r.Kind != recordKind {
		err := fmt.Errorf("apiVersion %q and kind %q, want %q or %q, and %q", r.APIVersion, r.Kind, recordVersion, sharingVersion, recordKind)
		if r.APIVersion != "" && r.Kind != "" {
			err = fmt.Errorf("%w: %w", errOtherVersion, err)
		}
		return nil, err
	}
	if r.Claim.UID != uid {
		return nil, fmt.Errorf("it is about claim %q", r.Claim.UID)
	}
	switch r.State {
	case Preparing, Prepared, Unpreparing:
	default:
		return nil, fmt.Errorf("%w: state %q", errOtherVersion, r.State)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return &r, nil
}

// check is about what the record says of devices and sessions.
func (r *Record) check() error {
	for i := range r.Devices {
		d := &r.Devices[i]
		err := d.check()
		if d.Sharing != nil && d.Sharing.Session != "" && r.session(d.Sharing.Session) == nil {
			err = errors.Join(err, fmt.Errorf("it says nothing of the MPS session %q", d.Sharing.Session))
		}
		if err != nil {
			return fmt.Errorf("device %d: %w", i, err)
		}
	}
	for i := range r.Sessions {
		if s := &r.Sessions[i]; s.ID == "" || len(s.Devices) == 0 {
			return fmt.Errorf("session %d: no name or no devices", i)
		}
	}
	return nil
}

func (d *DeviceRecord) check() error {
	switch {
	case d.Device == "" || d.PCIAddress == "":
		return errors.New("no name or no PCI address")
	case d.Type != device.Whole && d.Type != device.Partition && d.Type != static && !d.isShare():
		return fmt.Errorf("%w: type %q", errOtherVersion, d.Type)
	case !d.isShare() && (d.Type == device.Whole) != (d.Partition == nil):
		return fmt.Errorf("type %q does not go with what it says about a partition", d.Type)
	}
	return nil
}
