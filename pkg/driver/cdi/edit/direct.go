// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
)

// Direct marks a device that programs use without MPS and without software limits:
// a GPU or a partition that the claim has alone, or a share without limits. The
// hooks of other devices refuse a container that also has it, since in a client of
// MPS it would be invisible, and under software limits it would be limited as well.
// A device of admin access has no mark: it is there to be observed.
type Direct struct {
	// Device is the name of the device in the claim.
	Device string
	// Owner is unique on the node: a claim and its device.
	Owner string
}

// Edits never fails.
func (d Direct) Edits() (cdi.Edits, error) {
	return cdi.Edits{Env: []string{hook.Marker(hook.DirectMarkerPrefix, d.Owner) + "=" + d.Device}}, nil
}
