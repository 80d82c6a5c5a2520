// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/quote"
)

// Versions and kind of records.
const (
	Version = "journal.partage.dev/v1"
	// SharingVersion is that of records with something shared. A driver that does
	// not know it refuses the record; it would leave what was done for it behind.
	SharingVersion = "journal.partage.dev/v2"
	RecordKind     = "ClaimRecord"
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

// Ref names a claim.
type Ref struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
}

func (r Ref) String() string {
	return fmt.Sprintf("%s/%s (%s)", quote.Name(r.Namespace), quote.Name(r.Name), quote.Name(r.UID))
}

// Record is the content of a journal file.
type Record struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Claim      Ref    `json:"claim"`
	State      State  `json:"state"`
	// BootID is the kernel's at the time of the preparation. MIG instances do
	// not survive a reboot, so with another id nothing of it exists.
	BootID string `json:"bootID"`
	// Arrived is when the call came that prepared the claim, in nanoseconds since
	// the machine started; zero where it is not known.
	Arrived time.Duration `json:"arrived,omitempty"`
	// Devices are those whose preparation has begun, in the order in which they are
	// made. While the claim is Preparing, others of it may follow.
	Devices []Device `json:"devices"`
	// Sessions are the MPS sessions that devices are in.
	Sessions []Session `json:"sessions,omitempty"`
}

// New returns an empty record of a claim.
func New(claim Ref, bootID string) *Record {
	return &Record{APIVersion: Version, Kind: RecordKind, Claim: claim, State: Preparing, BootID: bootID}
}

// Add appends a device. The version becomes the oldest that can express it.
func (r *Record) Add(d Device) {
	if d.Sharing != nil || d.IsShare() {
		r.APIVersion = SharingVersion
	}
	r.Devices = append(r.Devices, d)
}

// Device finds a device by its name in the claim, or returns nil.
func (r *Record) Device(key string) *Device {
	for i := range r.Devices {
		if r.Devices[i].Key() == key {
			return &r.Devices[i]
		}
	}
	return nil
}

// Has reports whether the claim has the published device, or a share of it.
func (r *Record) Has(name string) bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool { return d.Device == name })
}

// Session finds a session by its ID, or returns nil.
func (r *Record) Session(id string) *Session {
	for i := range r.Sessions {
		if r.Sessions[i].ID == id {
			return &r.Sessions[i]
		}
	}
	return nil
}

// InSession reports whether a device of the claim is in the session.
func (r *Record) InSession(id string) bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool { return d.In(id) })
}

// Limited reports whether an interposer library limits a device of the claim.
func (r *Record) Limited() bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool { return d.Limited() })
}

// Remove takes a device out of the record, and the sessions that no other device
// of the claim is in.
func (r *Record) Remove(key string) {
	r.Devices = slices.DeleteFunc(r.Devices, func(d Device) bool { return d.Key() == key })
	r.Sessions = slices.DeleteFunc(r.Sessions, func(s Session) bool { return !r.InSession(s.ID) })
}

// RemoveSession notes that a session has ended for the claim.
func (r *Record) RemoveSession(id string) {
	for i := range r.Devices {
		if d := &r.Devices[i]; d.In(id) {
			d.Sharing.Session = ""
			d.dropEmptySharing()
		}
	}
	r.Sessions = slices.DeleteFunc(r.Sessions, func(s Session) bool { return s.ID == id })
}

// Arrange puts the devices into the order of another record, if they are the same
// ones: versions of the driver may order them differently. Otherwise it returns
// false and changes nothing.
func (r *Record) Arrange(other *Record) bool {
	if len(r.Devices) != len(other.Devices) {
		return false
	}
	arranged, ok := r.among(other)
	if ok {
		r.Devices = arranged
	}
	return ok
}

// Resume takes over what an earlier attempt at the same devices, or at some of them, has
// written down. It has to be taken back as it was written, whatever the policy says now.
func (r *Record) Resume(earlier *Record) {
	r.State, r.APIVersion = earlier.State, earlier.APIVersion
	for i := range r.Devices {
		d := &r.Devices[i]
		was := earlier.Device(d.Key())
		if was == nil {
			if d.Sharing != nil || d.IsShare() {
				r.APIVersion = SharingVersion
			}
			continue
		}
		was = ptr.To(was.clone())
		if d.Partition != nil {
			d.Partition.Live, d.Partition.Remaking = was.Partition.Live, was.Partition.Remaking
			if was.Partition.UUID != "" {
				d.Partition.UUID = was.Partition.UUID
			}
		}
		d.Sharing, d.CDIDevice = was.Sharing, was.CDIDevice
	}
	sessions := r.Sessions
	r.Sessions = earlier.Clone().Sessions
	for _, s := range sessions {
		if was := r.Session(s.ID); was != nil {
			was.takeLimits(&s)
		} else if r.InSession(s.ID) {
			r.Sessions = append(r.Sessions, s)
		}
	}
}

// PartOf reports whether every device of the record is one of another record.
func (r *Record) PartOf(other *Record) bool {
	found, _ := r.among(other)
	return len(found) == len(r.Devices)
}

// among lists the devices of the record in the order of another one, and reports
// whether all of the other's were found.
func (r *Record) among(other *Record) (found []Device, all bool) {
	for i := range other.Devices {
		at := slices.IndexFunc(r.Devices, func(d Device) bool { return d.same(&other.Devices[i]) })
		if at >= 0 {
			found = append(found, r.Devices[at])
		}
	}
	return found, len(found) == len(other.Devices)
}

// Clone returns a copy that has nothing in common with the original.
func (r *Record) Clone() *Record {
	copied := *r
	copied.Devices = slices.Clone(r.Devices)
	for i := range copied.Devices {
		copied.Devices[i] = copied.Devices[i].clone()
	}
	copied.Sessions = slices.Clone(r.Sessions)
	for i := range copied.Sessions {
		s := &copied.Sessions[i]
		s.Devices, s.MemoryBytes = slices.Clone(s.Devices), maps.Clone(s.MemoryBytes)
	}
	return &copied
}

func (d Device) clone() Device {
	d.Requests = slices.Clone(d.Requests)
	if d.Partition != nil {
		d.Partition = ptr.To(*d.Partition)
	}
	if d.Sharing != nil {
		d.Sharing = ptr.To(*d.Sharing)
	}
	return d
}

// SameOutcome reports whether two records of the same devices say the same about
// what became of them.
func (r *Record) SameOutcome(other *Record) bool {
	if len(r.Devices) != len(other.Devices) || len(r.Sessions) != len(other.Sessions) {
		return false
	}
	for i := range r.Devices {
		a, b := &r.Devices[i], &other.Devices[i]
		if a.CDIDevice != b.CDIDevice || !samePartition(a.Partition, b.Partition) {
			return false
		}
	}
	for i := range r.Sessions {
		a, b := &r.Sessions[i], other.Session(r.Sessions[i].ID)
		if b == nil || a.PipeDir != b.PipeDir || a.ShmDir != b.ShmDir || a.Losses != b.Losses || a.Kills != b.Kills || !slices.Equal(a.Devices, b.Devices) {
			return false
		}
	}
	return true
}

func samePartition(a, b *Partition) bool {
	if a == nil || b == nil {
		return a == b
	}
	return ptr.Equal(a.Live, b.Live) && a.UUID == b.UUID && a.Remaking == b.Remaking
}

// Static is the type of a partition that somebody else made: it is used as it is
// and neither made nor destroyed. It has a type of its own because a version that
// does not know it must refuse the record; it would destroy the partition.
const Static device.Kind = "mig-static"
