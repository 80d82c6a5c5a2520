// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import "github.com/partage-dev/partage/pkg/claim/record"

// overlap reports whether two devices use the same part of a GPU. Admin access uses nothing, and shares of one device are
// meant to be together.
func overlap(a, b *record.Device) bool {
	if a.PCIAddress != b.PCIAddress || a.Admin || b.Admin {
		return false
	}
	if a.Device == b.Device && a.ShareID != nil && b.ShareID != nil {
		return *a.ShareID == *b.ShareID
	}
	return a.Partition == nil || b.Partition == nil || a.Partition.Placement.Overlaps(b.Partition.Placement)
}
