// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package edit makes the container edits of devices. Each kind of edit is a small
// value in a file of its own; a device of a claim is the sum of several:
//
//	edit.Device("gpu-0000-1b-00-0-mps-…", edit.GPU{…}, edit.MPSClient{…})
//
// A value reads device numbers from the host where it needs them, and changes
// nothing. A new mechanism adds one file here.
package edit

import (
	"errors"
	"fmt"

	"github.com/partage-dev/partage/pkg/driver/cdi"
)

// Edit is one kind of change to the containers of a device.
type Edit interface {
	// Edits fails if containers would lack something that the device promises.
	Edits() (cdi.Edits, error)
}

// Device returns a device with the sum of the edits, in their order.
func Device(name string, edits ...Edit) (cdi.Device, error) {
	device := cdi.Device{Name: name}
	var errs []error
	for _, edit := range edits {
		e, err := edit.Edits()
		errs = append(errs, err)
		device.Append(e)
	}
	if err := errors.Join(errs...); err != nil {
		return cdi.Device{}, fmt.Errorf("container edits of device %s: %w", name, err)
	}
	return device, nil
}
