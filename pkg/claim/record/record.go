// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/quote"
)

// State is how far a claim has come.
type State string

const (
	// Preparing means that some of the devices may exist.
	Preparing State = "preparing"
	// Prepared means that all of it is there.
	Prepared State = "prepared"
	// Releasing means that some of the devices may be gone, and all have to go. A record that is
	// older than the last release of its claim reads so, too.
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
	// BootID is the kernel's at the time of the preparation. MIG instances do not survive a
	// reboot, so with another id nothing of it exists. It is part of the name of the file.
	BootID string `json:"-"`
	State  State  `json:"-"`
	// Arrived is when the call came that last prepared the claim, since the machine started.
	Arrived time.Duration `json:"-"`
	// Devices are those of the claim, in the order in which they are made.
	Devices []Device `json:"devices"`
	// Sessions are the MPS sessions that devices are in.
	Sessions []Session `json:"sessions,omitempty"`
}

// New returns an empty record of a claim.
func New(claim Ref, bootID string) *Record {
	return &Record{Claim: claim, State: Preparing, BootID: bootID}
}

// Add appends a device.
func (r *Record) Add(d Device) { r.Devices = append(r.Devices, d) }

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

// Limited reports whether an interposer library limits a device of the claim.
func (r *Record) Limited() bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool { return d.Limited() })
}

// clear marks the devices on a GPU as untouched, or all of them for "", and reports whether that is the last of the claim.
func (r *Record) clear(pciAddress string) (last bool) {
	last = true
	for i := range r.Devices {
		d := &r.Devices[i]
		if pciAddress == "" || d.PCIAddress == pciAddress {
			d.Mark = Untouched
		}
		last = last && d.Mark == Untouched
	}
	return last
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

// Clone returns a copy that has nothing in common with the original.
func (r *Record) Clone() *Record {
	copied := *r
	copied.Devices, copied.Sessions = nil, nil
	// What the file is made of can be encoded, and read again.
	_ = json.Unmarshal(encodeBody(r), &copied)
	for i := range copied.Devices {
		copied.Devices[i].Mark = r.Devices[i].Mark
	}
	return &copied
}

var uidSyntax = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z-]{0,62}$`)

// CheckUID keeps a UID from becoming another path.
func CheckUID(uid types.UID) error {
	if !uidSyntax.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: want letters, digits and dashes", uid)
	}
	return nil
}
