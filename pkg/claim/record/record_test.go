// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import "testing"

// TestLookups checks what is found in a record by name.
func TestLookups(t *testing.T) {
	r := example()
	r.Clone().Devices[0].Partition.Made.UUID = "changed in a copy"
	share := r.Device("gpu-0000-3b-00-0-mps-s1")
	if share == nil || !share.Shared().Limited || share.Shared().Interval != "Long" || r.Devices[0].Shared() != (Sharing{}) {
		t.Errorf("got %+v", share)
	}
	if r.Session("none") != nil || !r.Session("gpu-0000-3b-00-0-mps").Running() {
		t.Error("sessions")
	}
	if r.Device("none") != nil || r.Devices[0].Partition.Made.UUID != "MIG-1" {
		t.Error("devices")
	}
}
