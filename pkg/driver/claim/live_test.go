// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// liveOf is what is known of the only device of a claim.
func liveOf(t *testing.T, m *Manager, uid string) LiveDevice {
	t.Helper()
	all, err := m.Live()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if string(c.Claim.UID) == uid && len(c.Devices) == 1 {
			return c.Devices[0]
		}
	}
	t.Fatalf("no claim %s with one device among %+v", uid, all)
	return LiveDevice{}
}

// TestFolderCannotBeRead shows that nobody takes claims for gone whose records are in a folder that cannot be read, as with a
// disk that fails.
func TestFolderCannotBeRead(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	folder := filepath.Join(b.dataDir(), "records")
	if err := errors.Join(os.Rename(folder, folder+".kept"), os.WriteFile(folder, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, live := m.Live()
	_, counts := m.RecordCounts()
	_, inUse := m.InUse()
	for name, err := range map[string]error{"Live": live, "RecordCounts": counts, "InUse": inUse} {
		if err == nil || !strings.Contains(err.Error(), folder) {
			t.Errorf("%s: %v, want an error about %s", name, err, folder)
		}
	}
	if err := m.Unprepare(t.Context(), "u1"); err == nil || !strings.Contains(err.Error(), folder) || b.count(pciA) != 1 {
		t.Errorf("a release of which nobody will know: %v, want an error about %s; %v", err, folder, b.state())
	}
	if err := errors.Join(os.Remove(folder), os.Rename(folder+".kept", folder)); err != nil {
		t.Fatal(err)
	}
	if all, err := m.Live(); err != nil || len(all) > 0 {
		t.Errorf("when the folder is back, of a claim that is being released: %+v, %v", all, err)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// TestLive: what is known of each kind of device.
func TestLive(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	inventory := testInventory(t)
	if all, err := m.Live(); err != nil || len(all) > 0 {
		t.Fatalf("before there is a claim: %v, %v", all, err)
	}
	changed := m.Changed()
	mustPrepare(t, m, newClaim("whole", wholeC))
	select {
	case <-changed:
	default:
		t.Error("nothing says that something has changed")
	}
	mustPrepare(t, m, newClaim("slice", sliceA0))
	mustPrepare(t, m, portion("share", mpsB, "1Gi", "10"))
	mustPrepare(t, m, admin(newClaim("look", wholeC+"-observer")))

	resources := func(name string) (gpu.Resources, gpu.Resources) {
		d, found := inventory.Lookup(name)
		if !found {
			t.Fatalf("no device %s", name)
		}
		if d.Partition == nil {
			return d.GPU.Resources, d.GPU.Resources
		}
		return d.Partition.Profile.Resources, d.GPU.Resources
	}
	uuidOf := func(name string) string {
		d, _ := inventory.Lookup(name)
		return d.GPU.UUID
	}
	slice, _ := resources(sliceA0)
	_, gpuB := resources(mpsB)
	_, gpuC := resources(wholeC)
	live, found := b.look(addressA0)
	if !found {
		t.Fatal("there is no partition")
	}
	for uid, want := range map[string]LiveDevice{
		"whole": {Device: wholeC, Kind: device.Whole, PCIAddress: pciC, GPU: uuidOf(wholeC), Resources: gpuC},
		"slice": {
			Device: sliceA0, Kind: device.Partition, PCIAddress: pciA, GPU: uuidOf(sliceA0), Resources: slice,
			Partition: &LivePartition{
				PartitionID: gpu.PartitionID{InstanceID: live.InstanceID, ComputeID: live.ComputeID, UUID: live.UUID},
				Profile:     "1g.10gb", Placement: addressA0.Placement,
			},
		},
		"share": {
			Device: mpsB, Kind: device.MPS, PCIAddress: pciB, GPU: uuidOf(mpsB), Resources: gpuB,
			Limits:  &LiveLimits{MemoryBytes: 1 << 30, Percent: 10, Multiprocessors: m.devices().GPU(pciB).MPSMultiprocessors(gpuB.Multiprocessors, 10)},
			Session: &LiveSession{ID: wholeB, Running: true, Priority: policy.PriorityNormal},
		},
		"look": {Device: wholeC + "-observer", Kind: device.Observer, Admin: true, PCIAddress: pciC, GPU: uuidOf(wholeC), Resources: gpuC},
	} {
		got := liveOf(t, m, uid)
		want.Requests, want.Pool, want.Attributes = []string{"r0"}, poolName, inventory.AttributesOf(want.Device)
		if got.CDIDevice == "" {
			t.Errorf("claim %s has no CDI device", uid)
		}
		if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(LiveDevice{}, "ShareID", "CDIDevice")); diff != "" {
			t.Errorf("claim %s (-want +got):\n%s", uid, diff)
		}
		if (got.ShareID != nil) != (uid == "share") {
			t.Errorf("claim %s has the share %v", uid, got.ShareID)
		}
		if wantUUID := want.UUID(); got.UUID() != wantUUID || wantUUID == "" {
			t.Errorf("claim %s has UUID %q, want %q", uid, got.UUID(), wantUUID)
		}
	}

	mustUnprepare(t, m, "slice")
	if all, err := m.Live(); err != nil || slices.ContainsFunc(all, func(c LiveClaim) bool { return c.Claim.UID == "slice" }) {
		t.Errorf("after the claim was unprepared: %+v, %v", all, err)
	}
}

// TestLiveOwnSession: the limits of a session that a claim has for itself are those that its
// configuration sets.
func TestLiveOwnSession(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, ownMPSOfOne))
	got := liveOf(t, m, "own")
	r, err := m.store.Read("own")
	if err != nil || len(r.Sessions) != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	s := r.Sessions[0]
	want := &LiveLimits{
		MemoryBytes: s.Devices[0].MemoryBytes, Percent: s.Percent, Multiprocessors: m.devices().GPU(got.PCIAddress).MPSMultiprocessors(got.Resources.Multiprocessors, s.Percent),
	}
	if diff := cmp.Diff(want, got.Limits); diff != "" || want.MemoryBytes == 0 || want.Percent == 0 {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestLivePriority: the priority is the claim's, also where another claim has a higher one in
// the same session, and where the session is the claim's own.
func TestLivePriority(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, configure(portion("batch", mpsA, "1Gi", "30"), fromClaim, belowNormal))
	mustPrepare(t, m, portion("online", mpsA, "1Gi", "30"))
	mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, belowNormal))
	for uid, want := range map[string]policy.ClientPriority{
		"batch": policy.PriorityBelowNormal, "online": policy.PriorityNormal, "own": policy.PriorityBelowNormal,
	} {
		if got := liveOf(t, m, uid); got.Session == nil || got.Session.Priority != want {
			t.Errorf("claim %s has the session %+v, want the priority %s", uid, got.Session, want)
		}
	}
}

// TestLiveLimits: the share that the scheduler accounts to a claim is a limit only where
// something holds the claim to it.
func TestLiveLimits(t *testing.T) {
	m := newBox(t).bareManager()
	for name, test := range map[string]struct {
		device record.Device
		want   *LiveLimits
	}{
		"a turn with an interval": {device: record.Device{Type: device.TimeSlice, Sharing: &record.Sharing{Interval: "Short", Limits: record.Limits{MemoryBytes: 1 << 30}}}},
		"a turn with a library": {
			device: record.Device{Type: device.TimeSlice, Sharing: &record.Sharing{Limited: true, Limits: record.Limits{MemoryBytes: 1 << 30}}},
			want:   &LiveLimits{MemoryBytes: 1 << 30},
		},
		"a turn that the driver holds": {
			device: record.Device{Type: device.TimeSlice, Sharing: &record.Sharing{GuaranteedBytes: 1 << 29, Limits: record.Limits{MemoryBytes: 1 << 30}}},
			want:   &LiveLimits{MemoryBytes: 1 << 30, Held: true},
		},
	} {
		r := &record.Record{State: record.Prepared, Devices: []record.Device{test.device}}
		if diff := cmp.Diff(test.want, m.live(r)[0].Limits); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestLivePartitionGone: a partition that somebody removed has no UUID, and the same one again
// when it is made again.
func TestLivePartitionGone(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	first := liveOf(t, m, "u1")
	before := first.UUID()
	b.removeForeign(addressA0)
	wantError(t, m.cleanUp(t.Context()), "was removed by somebody else")
	if now := liveOf(t, m, "u1"); now.UUID() != "" || now.GPU == "" || !now.Partition.Gone || now.Partition.UUID != before {
		t.Errorf("after it was removed it has UUID %q on GPU %q: %+v, want the one that it had (%s), gone", now.UUID(), now.GPU, now.Partition, before)
	}
	mustPrepare(t, m, newClaim("u1", sliceA0))
	survey(t.Context(), m)
	if now := liveOf(t, m, "u1"); now.UUID() != before || now.Partition.Gone {
		t.Errorf("made again it is %+v, before it had UUID %q", now.Partition, before)
	}
}

// TestLiveOfEarlierBoot: nothing of another boot lives.
func TestLiveOfEarlierBoot(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", sliceA0))
	b.boot("boot-2")
	m := b.manager()
	all, err := m.Live()
	if len(all) > 0 || err != nil {
		t.Errorf("%+v, %v", all, err)
	}
	if r, err := m.store.Read("u1"); err != nil || r.State != record.Prepared {
		t.Errorf("record %+v, %v", r, err)
	}
}
