// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"testing"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// TestPartitionUUIDs shows by which UUID a claim knows its partition.
func TestPartitionUUIDs(t *testing.T) {
	live := &partition.Live{UUID: "MIG-2"}
	for name, test := range map[string]struct {
		partition *Partition
		live, own string
		gone      bool
	}{
		"whole GPU":         {nil, "", "", false},
		"not made":          {&Partition{}, "", "", false},
		"made":              {&Partition{Live: live, UUID: "MIG-2"}, "MIG-2", "MIG-2", false},
		"of an old version": {&Partition{Live: live}, "MIG-2", "MIG-2", false},
		"made again":        {&Partition{Live: live, UUID: "MIG-1"}, "MIG-2", "MIG-2", false},
		"gone":              {&Partition{UUID: "MIG-1"}, "", "MIG-1", true},
		"being made again":  {&Partition{UUID: "MIG-1", Remaking: true}, "", "", true},
	} {
		p := test.partition
		if p.LiveUUID() != test.live || p.OwnUUID() != test.own || p.Gone() != test.gone {
			t.Errorf("%s: got live %q, own %q, gone %v, want %q, %q, %v", name, p.LiveUUID(), p.OwnUUID(), p.Gone(), test.live, test.own, test.gone)
		}
	}
}

// TestIsIn looks for the partition of a claim among the instances of its GPU.
func TestIsIn(t *testing.T) {
	instance := func(start int, uuids ...string) gpu.Instance {
		i := gpu.Instance{ID: 7, ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
		for n, uuid := range uuids {
			i.Compute = append(i.Compute, gpu.ComputeInstance{ID: n, UUID: uuid})
		}
		return i
	}
	other := instance(4, "MIG-1")
	other.ProfileID = 20
	unknown, made, gone := &Partition{}, &Partition{Live: &partition.Live{UUID: "MIG-1"}}, &Partition{UUID: "MIG-1"}
	remaking := &Partition{UUID: "MIG-1", Remaking: true}
	for name, test := range map[string]struct {
		partition *Partition
		instances []gpu.Instance
		want      bool
	}{
		"unknown, nothing there":         {unknown, nil, false},
		"unknown, half made":             {unknown, []gpu.Instance{instance(4)}, true},
		"unknown, one there":             {unknown, []gpu.Instance{instance(0, "MIG-3"), instance(4, "MIG-2")}, true},
		"unknown, divided":               {unknown, []gpu.Instance{instance(4, "MIG-2", "MIG-3")}, true},
		"unknown, another place":         {unknown, []gpu.Instance{instance(0, "MIG-1")}, false},
		"unknown, another profile":       {unknown, []gpu.Instance{other}, false},
		"made":                           {made, []gpu.Instance{instance(4, "MIG-1")}, true},
		"made, another in its place":     {made, []gpu.Instance{instance(4, "MIG-2")}, false},
		"made, bare one in its place":    {made, []gpu.Instance{instance(4)}, false},
		"gone":                           {gone, nil, false},
		"gone, another in its place":     {gone, []gpu.Instance{instance(4, "MIG-2")}, false},
		"gone, bare one in its place":    {gone, []gpu.Instance{instance(4)}, true},
		"remaking, one in its place":     {remaking, []gpu.Instance{instance(4, "MIG-2")}, true},
		"remaking, nothing in its place": {remaking, []gpu.Instance{instance(0, "MIG-2")}, false},
	} {
		p := *test.partition
		p.ProfileID, p.Placement = 19, gpu.Placement{Start: 4, Size: 1}
		d := Device{Type: device.Partition, PCIAddress: claimtest.PCIA, Partition: &p}
		if got := d.IsIn(test.instances); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
	if w := whole("a", claimtest.PCIA); w.IsIn([]gpu.Instance{instance(4)}) {
		t.Error("a whole GPU is among its instances")
	}
}

func TestOverlaps(t *testing.T) {
	a0, a4 := slice("a0", claimtest.PCIA, 0), slice("a4", claimtest.PCIA, 4)
	half := slice("half", claimtest.PCIA, 0)
	half.Partition.ProfileID, half.Partition.Placement.Size = 9, 4
	admin := whole("a", claimtest.PCIA)
	admin.Admin = true
	turns := func(id string) Device { return share("turns", claimtest.PCIA, id, device.TimeSlice, nil) }
	for name, test := range map[string]struct {
		a, b          Device
		want, samePlc bool
	}{
		"the same place":           {a0, a0, true, true},
		"beside":                   {a0, a4, false, false},
		"inside":                   {a0, half, true, false},
		"whole and part":           {whole("a", claimtest.PCIA), a4, true, false},
		"whole and whole":          {whole("a", claimtest.PCIA), whole("a", claimtest.PCIA), true, true},
		"another GPU":              {a0, slice("b0", claimtest.PCIB, 0), false, false},
		"observed":                 {admin, whole("a", claimtest.PCIA), false, true},
		"shares of one device":     {turns("s1"), turns("s2"), false, true},
		"one share twice":          {turns("s1"), turns("s1"), true, true},
		"shares of two kinds":      {turns("s1"), share("mps", claimtest.PCIA, "s2", device.MPS, nil), true, true},
		"share and the whole":      {turns("s1"), whole("a", claimtest.PCIA), true, true},
		"share and a partition":    {turns("s1"), a0, true, false},
		"same name, not a share":   {whole("turns", claimtest.PCIA), turns("s1"), true, true},
		"same address, other size": {a4, half, false, false},
	} {
		if got := test.a.Overlaps(&test.b); got != test.want || test.b.Overlaps(&test.a) != test.want {
			t.Errorf("%s: overlap: got %v, want %v both ways", name, got, test.want)
		}
		if got := test.a.SamePlace(&test.b); got != test.samePlc || test.b.SamePlace(&test.a) != test.samePlc {
			t.Errorf("%s: same place: got %v, want %v both ways", name, got, test.samePlc)
		}
	}
}

func TestOwned(t *testing.T) {
	own, static, admin := slice("a0", claimtest.PCIA, 0), slice("a0", claimtest.PCIA, 0), slice("a0", claimtest.PCIA, 0)
	static.Type, admin.Admin = Static, true
	shared := slice("a0", claimtest.PCIA, 0)
	shared.Type = device.MPS
	for name, test := range map[string]struct {
		d    Device
		want bool
	}{
		"partition": {own, true}, "of somebody else": {static, false}, "observed": {admin, false}, "share": {shared, true},
		"whole": {whole("a", claimtest.PCIA), false},
	} {
		if got := test.d.Owned(); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

func TestSharers(t *testing.T) {
	turns := func(id string) Device { return share("turns", claimtest.PCIA, id, device.TimeSlice, nil) }
	observed := turns("s4")
	observed.Admin = true
	own := record("u1", turns("s1"), turns("s2"))
	others := []*Record{own, record("u2", turns("s3"), whole("b", claimtest.PCIB)), record("u3", observed), record("u4", whole("turns", claimtest.PCIA))}
	got := own.Devices[0].Sharers(others)
	if len(got) != 3 || got[0].Key() != "turns-s2" || got[1].Key() != "turns-s3" || got[1].Record.Claim.UID != "u2" {
		t.Errorf("got %+v", got)
	}
	if w := whole("b", claimtest.PCIB); w.SharedBy(others) {
		t.Error("a device without shares is shared")
	}
}
