// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
)

// ErrOtherVersion marks a record that is not damaged, but not for this program.
var ErrOtherVersion = errors.New("written by another version of the driver")

// Parse is strict about what the driver relies on and indifferent to fields that it
// does not know. The error wraps ErrOtherVersion for a record of another version.
func Parse(data []byte, uid types.UID) (*Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if (r.APIVersion != Version && r.APIVersion != SharingVersion) || r.Kind != RecordKind {
		err := fmt.Errorf("apiVersion %q and kind %q, want %q or %q, and %q", r.APIVersion, r.Kind, Version, SharingVersion, RecordKind)
		if r.APIVersion != "" && r.Kind != "" {
			err = fmt.Errorf("%w: %w", ErrOtherVersion, err)
		}
		return nil, err
	}
	if r.Claim.UID != uid {
		return nil, fmt.Errorf("it is about claim %q", r.Claim.UID)
	}
	switch r.State {
	case Preparing, Prepared, Unpreparing:
	default:
		return nil, fmt.Errorf("%w: state %q", ErrOtherVersion, r.State)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return &r, nil
}

func (r *Record) check() error {
	for i := range r.Devices {
		d := &r.Devices[i]
		err := d.check()
		if d.Sharing != nil && d.Sharing.Session != "" && r.Session(d.Sharing.Session) == nil {
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

func (d *Device) check() error {
	switch {
	case d.Device == "" || d.PCIAddress == "":
		return errors.New("no name or no PCI address")
	case d.Type != device.Whole && d.Type != device.Partition && d.Type != Static && !d.IsShare():
		return fmt.Errorf("%w: type %q", ErrOtherVersion, d.Type)
	case !d.IsShare() && (d.Type == device.Whole) != (d.Partition == nil):
		return fmt.Errorf("type %q does not match what it says about a partition", d.Type)
	}
	return nil
}
