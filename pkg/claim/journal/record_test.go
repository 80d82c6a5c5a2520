// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// slice returns a 1g partition that is not made yet.
func slice(name, pciAddress string, start int) Device {
	return Device{
		Requests: []string{"r0"}, Pool: claimtest.PoolName, Device: name, Type: device.Partition, PCIAddress: pciAddress,
		Partition: &Partition{Profile: "1g.10gb", ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}},
	}
}

// whole returns a GPU.
func whole(name, pciAddress string) Device {
	return Device{Requests: []string{"r0"}, Pool: claimtest.PoolName, Device: name, Type: device.Whole, PCIAddress: pciAddress}
}

// share returns a share of a GPU.
func share(name, pciAddress, id string, kind device.Kind, sharing *Sharing) Device {
	d := whole(name, pciAddress)
	d.Type, d.ShareID, d.Sharing = kind, ptr.To(types.UID(id)), sharing
	return d
}

// record returns one of these devices.
func record(uid types.UID, devices ...Device) *Record {
	r := New(Ref{UID: uid}, "boot-1")
	for _, d := range devices {
		r.Add(d.clone())
	}
	return r
}

func keys(r *Record) (keys []string) {
	for i := range r.Devices {
		keys = append(keys, r.Devices[i].Key())
	}
	return keys
}

// TestAdd shows that a record has the oldest version that can express it.
func TestAdd(t *testing.T) {
	for name, test := range map[string]struct {
		devices []Device
		want    string
	}{
		"none":          {nil, Version},
		"whole":         {[]Device{whole("a", claimtest.PCIA)}, Version},
		"time slice":    {[]Device{share("a", claimtest.PCIA, "s", device.TimeSlice, nil)}, SharingVersion},
		"own session":   {[]Device{{Device: "a", Type: device.Whole, Sharing: &Sharing{Session: "s"}}}, SharingVersion},
		"share, others": {[]Device{share("a", claimtest.PCIA, "s", device.MPS, &Sharing{}), whole("b", claimtest.PCIB)}, SharingVersion},
	} {
		if got := record("u1", test.devices...).APIVersion; got != test.want {
			t.Errorf("%s: got %s, want %s", name, got, test.want)
		}
	}
}

// TestArrange and PartOf compare the devices that records mean.
func TestArrange(t *testing.T) {
	a0, a4, b := slice("a0", claimtest.PCIA, 0), slice("a4", claimtest.PCIA, 4), whole("b", claimtest.PCIB)
	changed := func(d Device, change func(*Device)) Device {
		d = d.clone()
		change(&d)
		return d
	}
	made := changed(a0, func(d *Device) {
		d.Partition.Live, d.CDIDevice, d.Requests, d.DynamicMIG = &partition.Live{UUID: "MIG-1"}, "cdi", []string{"other"}, true
	})
	for name, test := range map[string]struct {
		devices, other []Device
		arranged       bool
		partOf         bool
	}{
		"none":             {nil, nil, true, true},
		"the same":         {[]Device{a0, b}, []Device{a0, b}, true, true},
		"another order":    {[]Device{b, a4, a0}, []Device{a0, a4, b}, true, true},
		"fewer":            {[]Device{b}, []Device{a0, b}, false, true},
		"more":             {[]Device{a0, b}, []Device{b}, false, false},
		"another":          {[]Device{a0, a4}, []Device{a0, b}, false, false},
		"made by now":      {[]Device{a0, b}, []Device{b, made}, true, true},
		"moved":            {[]Device{a0}, []Device{changed(a0, func(d *Device) { d.Partition.Placement.Start = 1 })}, false, false},
		"another GPU":      {[]Device{a0}, []Device{changed(a0, func(d *Device) { d.PCIAddress = claimtest.PCIB })}, false, false},
		"another pool":     {[]Device{a0}, []Device{changed(a0, func(d *Device) { d.Pool = "node-2" })}, false, false},
		"admin access":     {[]Device{a0}, []Device{changed(a0, func(d *Device) { d.Admin = true })}, false, false},
		"of somebody else": {[]Device{a0}, []Device{changed(a0, func(d *Device) { d.Type = Static })}, false, false},
		"another share": {
			[]Device{share("m", claimtest.PCIA, "s1", device.MPS, nil)}, []Device{share("m", claimtest.PCIA, "s2", device.MPS, nil)}, false, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, other := record("u1", test.devices...), record("u1", test.other...)
			if got := r.PartOf(other); got != test.partOf {
				t.Errorf("part of the other: got %v, want %v", got, test.partOf)
			}
			want := record("u1", test.devices...)
			if test.arranged {
				want = other
			}
			if got := r.Arrange(other); got != test.arranged {
				t.Errorf("arranged: got %v, want %v", got, test.arranged)
			}
			if diff := cmp.Diff(keys(want), keys(r)); diff != "" {
				t.Errorf("order: -want +got:\n%s", diff)
			}
			if name == "made by now" && r.Devices[1].Partition.Live != nil {
				t.Error("the order is taken over, nothing else")
			}
		})
	}
}

// TestResume takes over what an earlier attempt has written down, and nothing from what
// it has not begun.
func TestResume(t *testing.T) {
	live := &partition.Live{InstanceID: 7, UUID: "MIG-7"}
	session := Session{ID: "m", Shared: true, Devices: []SessionDevice{{Device: "m", PCIAddress: claimtest.PCIB, UUID: "GPU-b"}}}
	planned := session
	planned.Devices = []SessionDevice{{Device: "m", PCIAddress: claimtest.PCIB, UUID: "GPU-b", MemoryBytes: 5}}
	planned.MultiUser = true
	mps := func(percent int) Device {
		return share("m", claimtest.PCIB, "s", device.MPS, &Sharing{UUID: "GPU-b", Session: "m", Limits: Limits{Percent: percent}})
	}
	with := func(r *Record, change func(*Record)) *Record {
		change(r)
		return r
	}
	for name, test := range map[string]struct {
		plan, earlier, want *Record
	}{
		"a live partition": {
			plan: record("u1", slice("a0", claimtest.PCIA, 0)),
			earlier: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.State, r.Devices[0].Partition.Live, r.Devices[0].Partition.UUID, r.Devices[0].CDIDevice = Prepared, live, "MIG-7", "cdi"
			}),
			want: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.State, r.Devices[0].Partition.Live, r.Devices[0].Partition.UUID, r.Devices[0].CDIDevice = Prepared, live, "MIG-7", "cdi"
			}),
		},
		"one that is made again": {
			plan: record("u1", slice("a0", claimtest.PCIA, 0)),
			earlier: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.Devices[0].Partition.UUID, r.Devices[0].Partition.Remaking = "MIG-7", true
			}),
			want: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.Devices[0].Partition.UUID, r.Devices[0].Partition.Remaking = "MIG-7", true
			}),
		},
		"a static one keeps the UUID that was allocated": {
			plan: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.Devices[0].Type, r.Devices[0].Partition.UUID = Static, "MIG-1"
			}),
			earlier: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) { r.Devices[0].Type = Static }),
			want: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) {
				r.Devices[0].Type, r.Devices[0].Partition.UUID = Static, "MIG-1"
			}),
		},
		"an older policy": {
			plan:    with(record("u1", mps(50)), func(r *Record) { r.Sessions = []Session{planned} }),
			earlier: with(record("u1", mps(25)), func(r *Record) { r.Sessions = []Session{session} }),
			want: with(record("u1", mps(25)), func(r *Record) {
				r.Sessions = []Session{session}
				// Older versions did not write the limits of devices down.
				r.Sessions[0].Devices = planned.Devices
			}),
		},
		"not shared when it began": {
			plan: with(record("u1", mps(50)), func(r *Record) { r.Sessions = []Session{planned} }),
			earlier: with(record("u1", mps(50)), func(r *Record) {
				r.APIVersion, r.Devices[0].Sharing = Version, nil
			}),
			want: with(record("u1", mps(50)), func(r *Record) { r.APIVersion, r.Devices[0].Sharing = Version, nil }),
		},
		"only one of two had begun": {
			plan:    with(record("u1", slice("a0", claimtest.PCIA, 0), mps(50)), func(r *Record) { r.Sessions = []Session{planned} }),
			earlier: with(record("u1", slice("a0", claimtest.PCIA, 0)), func(r *Record) { r.Devices[0].Partition.Live = live }),
			want: with(record("u1", slice("a0", claimtest.PCIA, 0), mps(50)), func(r *Record) {
				r.Devices[0].Partition.Live, r.Sessions = live, []Session{planned}
			}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := test.earlier.Clone()
			test.plan.Resume(test.earlier)
			if diff := cmp.Diff(test.want, test.plan); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			for i := range test.plan.Devices {
				if d := &test.plan.Devices[i]; d.Sharing != nil {
					d.Sharing.Limits.Percent++
				}
			}
			if diff := cmp.Diff(before, test.earlier); diff != "" {
				t.Errorf("the earlier record has changed: -before +now:\n%s", diff)
			}
		})
	}
}

func TestSameOutcome(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Record)
		want   bool
	}{
		"nothing":             {func(*Record) {}, true},
		"state":               {func(r *Record) { r.State = Unpreparing }, true},
		"requests":            {func(r *Record) { r.Devices[0].Requests = nil }, true},
		"CDI device":          {func(r *Record) { r.Devices[0].CDIDevice = "" }, false},
		"partition gone":      {func(r *Record) { r.Devices[0].Partition.Live = nil }, false},
		"instance":            {func(r *Record) { r.Devices[0].Partition.Live.InstanceID++ }, false},
		"UUID":                {func(r *Record) { r.Devices[0].Partition.UUID = "" }, false},
		"being made again":    {func(r *Record) { r.Devices[0].Partition.Remaking = !r.Devices[0].Partition.Remaking }, false},
		"no partition":        {func(r *Record) { r.Devices[0].Partition = nil }, false},
		"a device less":       {func(r *Record) { r.Devices = r.Devices[1:] }, false},
		"a session less":      {func(r *Record) { r.Sessions = nil }, false},
		"another session":     {func(r *Record) { r.Sessions[0].ID = "other" }, false},
		"session not running": {func(r *Record) { r.Sessions[0].Stopped() }, false},
		"losses":              {func(r *Record) { r.Sessions[0].Losses++ }, false},
		"session's partition": {func(r *Record) { r.Sessions[0].Devices[0].UUID = "" }, false},
	} {
		r := present()
		test.change(r)
		if got := r.SameOutcome(present()); got != test.want {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
		if got := present().SameOutcome(r); got != test.want {
			t.Errorf("%s, the other way: got %v, want %v", name, got, test.want)
		}
	}
}

// TestClone shows that a copy has nothing in common with the original.
func TestClone(t *testing.T) {
	r := present()
	c := r.Clone()
	if diff := cmp.Diff(r, c); diff != "" {
		t.Fatalf("-original +copy:\n%s", diff)
	}
	for i := range c.Devices {
		d := &c.Devices[i]
		d.Requests[0] = "other"
		if d.Partition != nil {
			d.Partition.UUID = "other"
		}
		if d.Sharing != nil {
			d.Sharing.UUID = "other"
		}
	}
	c.Sessions[0].Devices[0].UUID, c.Sessions[0].MemoryBytes["GPU-b"] = "other", 1
	if diff := cmp.Diff(present(), r); diff != "" {
		t.Errorf("a change of the copy has changed the original: -want +got:\n%s", diff)
	}
}

// TestRemove shows that a session goes with its last device.
func TestRemove(t *testing.T) {
	r := record("u1",
		share("m", claimtest.PCIA, "s1", device.MPS, &Sharing{Session: "m"}), share("m", claimtest.PCIA, "s2", device.MPS, &Sharing{Session: "m"}))
	r.Sessions = []Session{{ID: "m"}}
	r.Remove("m-s1")
	if len(r.Devices) != 1 || len(r.Sessions) != 1 {
		t.Errorf("with one left: %+v", r)
	}
	r.Remove("m-s2")
	if len(r.Devices) != 0 || len(r.Sessions) != 0 {
		t.Errorf("with none left: %+v", r)
	}
}

// TestRemoveSession shows that what else is done to share a device stays.
func TestRemoveSession(t *testing.T) {
	r := record("u1",
		share("m", claimtest.PCIA, "s1", device.MPS, &Sharing{Session: "m"}),
		share("n", claimtest.PCIB, "s2", device.MPS, &Sharing{Session: "m", Interval: "Short"}),
		share("o", claimtest.PCIC, "s3", device.MPS, &Sharing{Session: "other"}))
	r.Sessions = []Session{{ID: "m"}, {ID: "other"}}
	r.RemoveSession("m")
	if r.Devices[0].Sharing != nil || r.Devices[1].Interval() != "Short" || r.InSession("m") || !r.InSession("other") || len(r.Sessions) != 1 {
		t.Errorf("got %+v", r)
	}
}
