// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sharing makes devices shared: MPS sessions with the compute mode that
// keeps clients from running without their limits, and time slices.
//
// It keeps no state. What it does is idempotent and found again by the session's
// ID and the device's address, so that another process can finish or undo it.
// The caller holds the locks of all GPUs that a call is about.
package sharing

import (
	"errors"
	"fmt"
	"strings"

	"github.com/partage-dev/partage/pkg/policy"
)

// ErrNoSupervisor says that the MPS supervisor of this node does not answer. What
// it started may run on.
var ErrNoSupervisor = errors.New("the MPS supervisor of this node does not answer")

// ErrLeft says that a start has failed and has left something, which Stop ends.
var ErrLeft = errors.New("it has left something behind")

// Device is a whole GPU or a MIG partition that is shared.
type Device struct {
	// PCIAddress is the GPU's.
	PCIAddress string
	// UUID is the GPU's ("GPU-…") or the MIG device's ("MIG-…").
	UUID string
}

// partition tells whether it is a MIG partition.
func (d Device) partition() bool { return strings.HasPrefix(d.UUID, "MIG-") }

func (d Device) String() string {
	if d.partition() {
		return fmt.Sprintf("MIG device %s of GPU %s", d.UUID, d.PCIAddress)
	}
	return fmt.Sprintf("GPU %s (%s)", d.PCIAddress, d.UUID)
}

// Limits are what a session's server holds all its clients to. Zero sets none.
type Limits struct {
	// ThreadPercentage is of the multiprocessors, 1 to 100.
	ThreadPercentage int
	// MemoryBytes are by UUID.
	MemoryBytes map[string]int64
}

// Session is MPS on GPUs or on one partition. One GPU or partition is in one
// session at most, whose ID is the name of its first device without the kind of
// share: "gpu-0000-1b-00-0", "gpu-0000-1b-00-0-mig-1g10gb-4".
type Session struct {
	ID        string
	Devices   []Device
	Limits    Limits
	MultiUser bool
}

// Live is what clients of a session need.
type Live struct {
	// PipeDir and ShmDir are folders of the host.
	PipeDir, ShmDir string
	// Losses is mps.Status.Losses at this moment.
	Losses int
}

// Interval is how long a process keeps a time-sliced GPU.
type Interval = policy.Interval
