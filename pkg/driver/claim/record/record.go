// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package record keeps on disk what claims have on this node: one record per claim, written before any hardware is changed
// and gone when nothing is left. A record names devices by physical address, so that another process finds them again after
// a crash, and it is all that a release needs. Below the data folder are files of one kind:
//
//	records/<uid>.<boot id>      the record of a claim, or when it was released
//	records/<uid>.<boot id>.<n>  the same, where a file of each other name cannot be read
//
// What cannot be read is neither changed nor moved, since another version may read it: it guards what it may be about, and
// the next free name is taken. The name says in which boot a file was written, whatever has become of its content: nothing
// of another boot is left on the hardware.
//
// The time of a release is kept on disk, so that an older call does not prepare the claim again: for other processes, if there are any,
// and where files of the claim cannot be read. Then it is kept with their checksum.
//
// A file is one line, the head, and a body of JSON. The head says what changes while a claim lives, with a fixed width, so
// that a release needs no space on the disk. What cannot be written all the same is kept in memory until it can.
//
// The format only grows. A field of the body that an older version did not write reads as its zero value, which means what
// that version did. One that a newer version wrote is ignored, and lost when the body is written again, which a release
// never does. What an older version must not ignore gets a new type of device, a new state or another version of the head:
// what it does not know it does not touch.
package record

import (
	"fmt"
	"regexp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// State is how far a claim has come.
type State string

const (
	// Preparing means that some of the devices may exist.
	Preparing State = "preparing"
	// Prepared means that all of it is there.
	Prepared State = "prepared"
	// Releasing means that some of the devices may be gone, and all have to go. A record that is older than the last
	// release of its claim reads so, too.
	Releasing State = "releasing"
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

// Record is what a claim has, or had, on this node.
type Record struct {
	Claim Ref `json:"claim"`
	// BootID is the kernel's at the time of the preparation. MIG instances do not survive a reboot, so with another id
	// nothing of it exists. It is part of the name of the file.
	BootID string `json:"-"`
	State  State  `json:"-"`
	// Arrived is when the call came that last prepared the claim, since the machine started.
	Arrived time.Duration `json:"-"`
	// Devices are those of the claim, in the order in which they are made.
	Devices  []Device  `json:"devices"`
	Sessions []Session `json:"sessions,omitempty"`
}

// Device finds a device by its name in the claim, or returns nil.
func (r *Record) Device(key string) *Device {
	if i := slices.IndexFunc(r.Devices, func(d Device) bool { return d.Key() == key }); i >= 0 {
		return &r.Devices[i]
	}
	return nil
}

// Session finds a session by its ID, or returns nil.
func (r *Record) Session(id string) *Session {
	if i := slices.IndexFunc(r.Sessions, func(s Session) bool { return s.ID == id }); i >= 0 {
		return &r.Sessions[i]
	}
	return nil
}

// clear marks the devices on a GPU as untouched, or all of them for "", and reports whether that is the last of the claim.
func (r *Record) clear(pciAddress string) (last bool) {
	for i := range r.Devices {
		if d := &r.Devices[i]; pciAddress == "" || d.PCIAddress == pciAddress {
			d.Mark = Untouched
		}
	}
	return !slices.ContainsFunc(r.Devices, func(d Device) bool { return d.Mark != Untouched })
}

// GPUs returns the PCI addresses of the devices, each once.
func (r *Record) GPUs() []string {
	gpus := []string{}
	for i := range r.Devices {
		gpus = append(gpus, r.Devices[i].PCIAddress)
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// OnlyObserves reports whether the claim has nothing of a GPU, but may observe all of it.
func (r *Record) OnlyObserves(pciAddress string) bool {
	return !slices.ContainsFunc(r.Devices, func(d Device) bool { return d.PCIAddress == pciAddress && (!d.Admin || d.Partition != nil) })
}

// Clone returns a copy that has nothing in common with the original.
func (r *Record) Clone() *Record {
	if r == nil {
		return nil
	}
	r = copyOf(r)
	r.Devices = slices.Clone(r.Devices)
	for i := range r.Devices {
		d := &r.Devices[i]
		d.Requests, d.ShareID, d.Partition, d.Sharing = slices.Clone(d.Requests), copyOf(d.ShareID), copyOf(d.Partition), copyOf(d.Sharing)
		if d.Partition != nil {
			d.Partition.Made = copyOf(d.Partition.Made)
		}
	}
	r.Sessions = slices.Clone(r.Sessions)
	for i := range r.Sessions {
		r.Sessions[i].Devices = slices.Clone(r.Sessions[i].Devices)
	}
	return r
}

func copyOf[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

var uidSyntax = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z-]{0,62}$`)

// CheckUID keeps a UID from becoming another path.
func CheckUID(uid types.UID) error {
	if !uidSyntax.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: want letters, digits and dashes", uid)
	}
	return nil
}

// Static is the type of a partition that somebody else made: it is used as it is and neither made nor destroyed. It has a
// type of its own because a version that does not know it must refuse the record; it would destroy the partition.
const Static device.Kind = "mig-static"

// Mark says how much of a device has been made.
type Mark uint8

const (
	// Untouched means that nothing of it is there.
	Untouched Mark = iota
	// Started is written before the first effect, when the place was seen to be empty: what is there now is the claim's.
	Started
	// Lost means that it was started, and seen to be absent since: what is there now is somebody else's.
	Lost
	// Announced means that MIG mode is turned on for it, and that nothing else of it is there: a partition in its place is
	// somebody else's.
	Announced
)

// Device is one device of a claim, or one share of a device.
type Device struct {
	// Requests are the names of the requests, or "request/subrequest", that the device was allocated for.
	Requests []string   `json:"requests"`
	Pool     string     `json:"pool"`
	Device   string     `json:"device"`
	ShareID  *types.UID `json:"shareID,omitempty"`
	Admin    bool       `json:"adminAccess,omitempty"`
	// Type is a kind of package device, or Static.
	Type device.Kind `json:"type"`
	// PCIAddress is the identity of the GPU. Its minor number moves at every boot and is looked up when it is needed.
	PCIAddress string `json:"pciAddress"`
	// DynamicMIG allows the GPU's MIG mode to follow the claims.
	DynamicMIG bool `json:"dynamicMIG,omitempty"`
	// Divisible means that the GPU can have MIG mode, so that a whole one must not.
	Divisible bool `json:"divisible,omitempty"`
	// Mark is in the head of the file.
	Mark Mark `json:"-"`
	// Clients is how many claims can have a share of the device that a call wants, or 0 where it does not matter: claims keep
	// what they had, also of a device that the policy has withdrawn. It is not written down.
	Clients int `json:"-"`
	// Partition is nil for a whole GPU.
	Partition *Partition `json:"partition,omitempty"`
	// Sharing is nil where nothing is done to share the device.
	Sharing *Sharing `json:"sharing,omitempty"`
	// CDIDevice is the qualified name, empty until the spec is written.
	CDIDevice string `json:"cdiDevice,omitempty"`
}

// Place is a MIG profile at a placement. A partition is known by its place: anybody's partition there gets the same UUID.
type Place struct {
	ProfileID     uint32 `json:"profileID"`
	gpu.Placement `json:"placement"`
}

// Undivided is the place of a whole GPU and of shares of one.
var Undivided = Place{}

// Overlaps reports whether two places on one GPU have a part in common.
func (p Place) Overlaps(q Place) bool {
	return p == Undivided || q == Undivided || p.Placement.Overlaps(q.Placement)
}

// On is the address of a partition there.
func (p Place) On(pciAddress string) partition.Address {
	return partition.Address{PCIAddress: pciAddress, ProfileID: p.ProfileID, Placement: p.Placement}
}

// Partition is where a partition is and what it became.
type Partition struct {
	// Profile is the profile's name, for people.
	Profile string `json:"profile"`
	Place
	// Made is what the claim's CDI spec names, for people and for rules about specs: a partition is known by its place.
	Made *gpu.PartitionID `json:"made,omitempty"`
}

// UUID is that of the partition, empty before it is made.
func (p *Partition) UUID() string {
	if p.Made == nil {
		return ""
	}
	return p.Made.UUID
}

// Sharing is what is done to share a device.
type Sharing struct {
	// UUID is the GPU's.
	UUID string `json:"uuid"`
	// Session is the ID of the MPS session that the device is in, or empty.
	Session string `json:"session,omitempty"`
	Limits  Limits `json:"limits,omitzero"`
	// Interval is the time slice that the GPU has for the claim, or empty.
	Interval policy.Interval `json:"interval,omitempty"`
	// Limited means that an interposer library holds the claim to its limits.
	Limited bool `json:"limited,omitempty"`
	// GuaranteedBytes is how much of its memory the driver keeps for each container of the claim, which it holds to all of it. It
	// is 0 where the driver holds no limit.
	GuaranteedBytes int64 `json:"guaranteedBytes,omitempty"`
	// OnClientKilled is what the policy asked for when the share was prepared, or empty.
	OnClientKilled policy.OnClientKilled `json:"onClientKilled,omitempty"`
	// ClientPriority is that of the claim's clients in a session that claims share. Empty is normal.
	ClientPriority policy.ClientPriority `json:"clientPriority,omitempty"`
}

// Limits are what one claim may use of a share: percent of the multiprocessors, and device memory. Zero is no limit.
type Limits struct {
	Percent     int   `json:"percent,omitempty"`
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// Key names the device, or the share of it, within the claim.
func (d *Device) Key() string {
	if d.ShareID == nil {
		return d.Device
	}
	return d.Device + "-" + string(*d.ShareID)
}

// Place is where the device is on its GPU.
func (d *Device) Place() Place {
	if d.Partition == nil {
		return Undivided
	}
	return d.Partition.Place
}

// SessionID is that of the MPS session that the device is in, or empty.
func (d *Device) SessionID() string { return d.Shared().Session }

// IsStatic reports whether the device is a partition that somebody else made, which is used as it is.
func (d *Device) IsStatic() bool { return d.Type == Static }

// IsMadeForClaims reports whether the device is a partition that is made for claims, and destroyed with the last.
func (d *Device) IsMadeForClaims() bool { return d.Partition != nil && !d.IsStatic() }

// SameDevice reports whether both are slots of one shared device.
func (d *Device) SameDevice(other *Device) bool {
	return d.Type.IsShare() && other.Type.IsShare() && !d.Admin && !other.Admin && d.PCIAddress == other.PCIAddress && d.Device == other.Device
}

// Conflicts reports whether two claims cannot have both.
func (d *Device) Conflicts(other *Device) bool {
	return d.PCIAddress == other.PCIAddress && !d.Admin && !other.Admin && d.Place().Overlaps(other.Place()) && !d.SameDevice(other)
}

// Address returns where the partition is. The device must be one.
func (d *Device) Address() partition.Address { return d.Place().On(d.PCIAddress) }

// Shared is what is done to share the device, if anything.
func (d *Device) Shared() Sharing {
	if d.Sharing == nil {
		return Sharing{}
	}
	return *d.Sharing
}

// Session is an MPS session that devices of a claim are in.
type Session struct {
	ID string `json:"id"`
	// Shared means that claims have shares of it: its limits are the largest among theirs, and it ends with the last.
	// Otherwise it is the claim's own.
	Shared bool `json:"shared,omitempty"`
	// Devices have no UUID before a partition exists.
	Devices   []SessionDevice `json:"devices"`
	MultiUser bool            `json:"multiUser,omitempty"`
	// Percent is a limit of the claim's own session. The others are those of the devices.
	Percent int `json:"percent,omitempty"`
	// ClientPriority is that of clients of the claim's own session. Empty is normal.
	ClientPriority policy.ClientPriority `json:"clientPriority,omitempty"`
	// PipeDir and ShmDir are empty until the session runs for the claim.
	PipeDir string `json:"pipeDir,omitempty"`
	ShmDir  string `json:"shmDir,omitempty"`
	// Losses is how often the clients had lost their server by then, or when that was last reported.
	Losses int `json:"losses,omitempty"`
	// Kills is the same for clients that were killed while others went on.
	Kills int `json:"kills,omitempty"`
}

// SessionDevice is a GPU or a partition in a session.
type SessionDevice struct {
	Device     string `json:"device"`
	PCIAddress string `json:"pciAddress"`
	UUID       string `json:"uuid,omitempty"`
	// MemoryBytes is the limit that the claim's configuration sets on the device in a session of its own, or zero.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// Running reports whether the session was started for the claim, and not found to be gone since.
func (s *Session) Running() bool { return s.PipeDir != "" }
