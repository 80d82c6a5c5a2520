// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/claimtest"
)

func whole(name string) record.Device {
	return record.Device{Device: name, Type: device.Whole, PCIAddress: claimtest.PCIA}
}

func slice(address string, start, size int) record.Device {
	return record.Device{Type: device.Partition, PCIAddress: address, Partition: &record.Partition{Place: record.Place{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: size}}}}
}

func share(name, id string, kind device.Kind) record.Device {
	return record.Device{Device: name, Type: kind, PCIAddress: claimtest.PCIA, ShareID: ptr.To(types.UID(id))}
}

func TestOverlap(t *testing.T) {
	admin, turns := whole("a"), share("turns", "s1", device.TimeSlice)
	admin.Admin = true
	for name, test := range map[string]struct {
		a, b record.Device
		want bool
	}{
		"the same place":         {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 0, 1), true},
		"beside":                 {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 4, 1), false},
		"inside":                 {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 0, 4), true},
		"whole and part":         {whole("a"), slice(claimtest.PCIA, 4, 1), true},
		"whole and whole":        {whole("a"), whole("a"), true},
		"another GPU":            {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIB, 0, 1), false},
		"observed":               {admin, whole("a"), false},
		"shares of one device":   {turns, share("turns", "s2", device.TimeSlice), false},
		"one share twice":        {turns, share("turns", "s1", device.TimeSlice), true},
		"shares of two kinds":    {turns, share("mps", "s2", device.MPS), true},
		"share and the whole":    {turns, whole("a"), true},
		"share and a partition":  {turns, slice(claimtest.PCIA, 0, 1), true},
		"same name, not a share": {whole("turns"), turns, true},
	} {
		if got := overlap(&test.a, &test.b); got != test.want || overlap(&test.b, &test.a) != test.want {
			t.Errorf("%s: got %v, want %v both ways", name, got, test.want)
		}
	}
}
