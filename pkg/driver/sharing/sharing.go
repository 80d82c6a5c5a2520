// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sharing sets up devices for sharing: MPS sessions, with the compute mode
// that keeps clients from running without their limits, and time slices.
//
// It keeps no state. Its effects are idempotent and found again by the session's ID
// and the device's address, so that another process can complete or undo them. The
// caller holds the locks of all GPUs that a call is about.
package sharing

import (
	"fmt"
	"strings"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
)

// ErrNoSupervisor means that the MPS supervisor of this node does not answer. What it started
// may still run.
var ErrNoSupervisor = mps.ErrUnavailable

// Device is a whole GPU or a MIG partition to be shared.
type Device struct {
	// PCIAddress is the GPU's.
	PCIAddress string
	// UUID is the GPU's ("GPU-…") or the MIG device's ("MIG-…").
	UUID string
}

// isPartition reports whether the device is a MIG partition.
func (d Device) isPartition() bool { return strings.HasPrefix(d.UUID, "MIG-") }

func (d Device) String() string {
	if d.isPartition() {
		return fmt.Sprintf("MIG device %s of GPU %s", d.UUID, d.PCIAddress)
	}
	return fmt.Sprintf("GPU %s (%s)", d.PCIAddress, d.UUID)
}

// Interval is how long a process may use a time-sliced GPU before the next one.
type Interval = policy.Interval
