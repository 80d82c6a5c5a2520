// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

func whole(name string) Device { return Device{Device: name, Type: device.Whole, PCIAddress: pciA} }

func slice(address string, start, size int) Device {
	return Device{Type: device.Partition, PCIAddress: address, Partition: &Partition{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: size}}}
}

func share(name, id string, kind device.Kind) Device {
	return Device{Device: name, Type: kind, PCIAddress: pciA, ShareID: ptr.To(types.UID(id))}
}

func TestOverlaps(t *testing.T) {
	admin, turns := whole("a"), share("turns", "s1", device.TimeSlice)
	admin.Admin = true
	for name, test := range map[string]struct {
		a, b Device
		want bool
	}{
		"the same place":         {slice(pciA, 0, 1), slice(pciA, 0, 1), true},
		"beside":                 {slice(pciA, 0, 1), slice(pciA, 4, 1), false},
		"inside":                 {slice(pciA, 0, 1), slice(pciA, 0, 4), true},
		"whole and part":         {whole("a"), slice(pciA, 4, 1), true},
		"whole and whole":        {whole("a"), whole("a"), true},
		"another GPU":            {slice(pciA, 0, 1), slice(pciB, 0, 1), false},
		"observed":               {admin, whole("a"), false},
		"shares of one device":   {turns, share("turns", "s2", device.TimeSlice), false},
		"one share twice":        {turns, share("turns", "s1", device.TimeSlice), true},
		"shares of two kinds":    {turns, share("mps", "s2", device.MPS), true},
		"share and the whole":    {turns, whole("a"), true},
		"share and a partition":  {turns, slice(pciA, 0, 1), true},
		"same name, not a share": {whole("turns"), turns, true},
	} {
		if got := test.a.Overlaps(&test.b); got != test.want || test.b.Overlaps(&test.a) != test.want {
			t.Errorf("%s: got %v, want %v both ways", name, got, test.want)
		}
	}
}

// TestLookups checks what is found in a record by name.
func TestLookups(t *testing.T) {
	r := example()
	r.Clone().Devices[0].Partition.Made.UUID = "changed in a copy"
	share := r.Device("gpu-0000-3b-00-0-mps-s1")
	if share == nil || !share.Limited() || share.Interval() != "Long" || r.Devices[0].Interval() != "" || r.Devices[0].Limited() {
		t.Errorf("got %+v", share)
	}
	if r.Session("none") != nil || !r.Session("gpu-0000-3b-00-0-mps").Running() {
		t.Error("sessions")
	}
	if r.Device("none") != nil || r.Devices[0].Partition.Made.UUID != "MIG-1" {
		t.Error("devices")
	}
}
