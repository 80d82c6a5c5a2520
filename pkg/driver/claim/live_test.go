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
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// liveOf is what is known of the only device of a claim.
func liveOf(t *testing.T, m *Manager, uid string) LiveDevice {
	t.Helper()
	all := must.Get(m.Live())(t)
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
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	folder := filepath.Join(b.dataDir(), "records")
	must.Do(t, errors.Join(os.Rename(folder, folder+".kept"), os.WriteFile(folder, nil, 0o600)))
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
	must.Do(t, errors.Join(os.Remove(folder), os.Rename(folder+".kept", folder)))
	if all, err := m.Live(); err != nil || len(all) > 0 {
		t.Errorf("when the folder is back, of a claim that is being released: %+v, %v", all, err)
	}
	b.endAll(m, "u1")
}

// TestLive: what is known of each kind of device.
func TestLive(t *testing.T) {
	b, m := newNode(t)
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

	gpuA, gpuB, gpuC := m.devices().GPU(pciA), m.devices().GPU(pciB), m.devices().GPU(pciC)
	slice, _ := inventory.Lookup(sliceA0)
	live, _ := b.look(addressA0)
	for uid, want := range map[string]LiveDevice{
		"whole": {Device: wholeC, Kind: device.Whole, PCIAddress: pciC, GPU: gpuC.UUID, Resources: gpuC.Resources},
		"slice": {
			Device: sliceA0, Kind: device.Partition, PCIAddress: pciA, GPU: gpuA.UUID, Resources: slice.Partition.Profile.Resources,
			Partition: &LivePartition{
				PartitionID: gpu.PartitionID{InstanceID: live.InstanceID, ComputeID: live.ComputeID, UUID: live.UUID},
				Profile:     "1g.10gb", Placement: addressA0.Placement,
			},
		},
		"share": {
			Device: mpsB, Kind: device.MPS, PCIAddress: pciB, GPU: gpuB.UUID, Resources: gpuB.Resources,
			Limits:  &LiveLimits{MemoryBytes: 1 << 30, Percent: 10, Multiprocessors: gpuB.MPSMultiprocessors(gpuB.Resources.Multiprocessors, 10)},
			Session: &LiveSession{ID: wholeB, Running: true, Priority: policy.PriorityNormal},
		},
		"look": {Device: wholeC + "-observer", Kind: device.Observer, Admin: true, PCIAddress: pciC, GPU: gpuC.UUID, Resources: gpuC.Resources},
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
	_, m := newNode(t)
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
	_, m := newNode(t)
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
	b, m := newNode(t)
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

// edits is what a claim's CDI spec says beside device nodes, one device after the
// other. Temporary folders have a name that does not change.
func (b *box) edits(uid types.UID) []string {
	var all []string
	for _, d := range b.spec(uid) {
		env := slices.Sorted(slices.Values(d.Env))
		for _, v := range env {
			all = append(all, "env "+v)
		}
		for _, m := range d.Mounts {
			mode := "rw"
			if m.ReadOnly {
				mode = "ro"
			}
			all = append(all, "mount "+mode+" "+strings.TrimPrefix(m.HostPath, b.dataDir())+" at "+m.ContainerPath)
		}
		for _, h := range d.Hooks {
			all = append(all, "hook "+h.Path+" "+strings.Join(h.Args, " "))
		}
		all = append(all, "")
	}
	return all
}

// clientOf is what makes containers clients of a session.
func clientOf(id string, env ...string) []string {
	all := []string{"env CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"}
	for _, v := range env {
		all = append(all, "env "+v)
	}
	slices.Sort(all)
	return append(all,
		"mount ro /mps/"+id+"/pipe at /tmp/nvidia-mps",
		"mount rw /mps/"+id+"/shm at /dev/shm",
		"hook /data/partage-hook partage-hook mps-client --control /mps/"+id+"/pipe/control --session "+id,
		"")
}

func TestClients(t *testing.T) {
	share := func(uid, device string, memory, percent string) *resourceapi.ResourceClaim {
		return newShare(uid, device, map[resourceapi.QualifiedName]string{"memory": memory, "smPercent": percent})
	}
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		"whole": {newClaim("u1", wholeA), []string{"env PARTAGE_GPU_538a2da9=" + wholeA, ""}},
		"MPS share": {share("u1", mpsA, "10Gi", "30"), clientOf(wholeA,
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M", "PARTAGE_MPS_ed27074f="+wholeA)},
		"share of a partition": {share("u1", mpsSliceA0, "1536Mi", "100"), clientOf(sliceA0,
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1536M", "PARTAGE_MPS_0718c9fe="+sliceA0)},
		// The same for both, so that a container can have both.
		"GPUs of its own": {configure(newClaim("u1", wholeA, wholeB), fromClaim, ownMPS), slices.Concat(
			clientOf(wholeA, "PARTAGE_MPS_538a2da9="+wholeA), clientOf(wholeA, "PARTAGE_MPS_538a2da9="+wholeA))},
		// Markers differ, so that no container can.
		"partitions of its own": {configure(newClaim("u1", sliceA0, sliceA4), fromClaim, migMPS), slices.Concat(
			clientOf(sliceA0, "PARTAGE_MPS_a8b2f356="+sliceA0), clientOf(sliceA4, "PARTAGE_MPS_f90e891d="+sliceA4))},
		"observed": {admin(newClaim("u1", mpsA, turnsC)), []string{"", ""}},
		"turns": {share("u1", turnsC, "6Gi", "25"), []string{
			"env CUDA_DEVICE_MEMORY_LIMIT=6144m",
			"env CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/caches/" + turnsC + "-share-u1/usage.cache",
			"env CUDA_DEVICE_SM_LIMIT=25",
			"env PARTAGE_LIMITS_facfa011=" + turnsC + "-share-u1",
			"mount ro /opt/limits/libvgpu.so at /usr/local/vgpu/libvgpu.so",
			"mount ro /limits/u1/ld.so.preload at /etc/ld.so.preload",
			"mount rw /limits/u1/caches/" + turnsC + "-share-u1 at /usr/local/vgpu/caches/" + turnsC + "-share-u1",
			"mount rw /limits/u1/locks at /tmp/vgpulock",
			"hook /data/partage-hook partage-hook software-limits",
			"",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, test.claim)
			expect.Same(t, b.edits("u1"), test.want)
			b.endAll(m, "u1")
		})
	}
}

// A container with shares that the driver holds has a hook for each; one of two on the same GPU is refused before.
func TestSpecOfHeldShares(t *testing.T) {
	b, m := newNode(t)
	m.engine.Specs.Sockets = "/data/memory-limits"
	node := testNode()
	for i := range node.GPUs {
		node.GPUs[i].MemoryLimits = true
	}
	m.SetInventory(inventoryOf(t, node, device.Terms{Policy: testPolicy()}))
	mustPrepare(t, m, newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "0"}))
	want := []string{
		"env PARTAGE_GPU_63f4e2f3=" + turnsC + "-share-u1",
		"env PARTAGE_MEMORY_63f4e2f3=" + pciC,
		"hook /data/partage-hook partage-hook memory-limit --sockets /data/memory-limits --gpu " + pciC + " --uuid GPU-c --soft 6442450944 --hard 6442450944",
		"",
	}
	expect.Same(t, b.edits("u1"), want)
	claim := newClaim("u2", turnsA, turnsA)
	for i := range claim.Status.Allocation.Devices.Results {
		claim.Status.Allocation.Devices.Results[i].Request = "both"
	}
	wantError(t, runPrepare(t.Context(), m, claim), "request both", "several shares of one GPU")
	b.endAll(m, "u1")
}

// limitsOfSpec are the variables with limits in software, by device.
func (b *box) limitsOfSpec(uid types.UID) []string {
	return slices.DeleteFunc(b.edits(uid), func(line string) bool {
		return line != "" && !strings.Contains(line, "_LIMIT") || strings.Contains(line, "PARTAGE_LIMITS")
	})
}

// The library numbers the GPUs that a container has, which the claim does not know. So
// limits have no number, and the hook refuses a container with other devices.
func TestLimitsWithoutNumbers(t *testing.T) {
	set := func(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		for i := range claim.Status.Allocation.Devices.Results {
			memory := string(rune('1'+i)) + "Gi"
			claim.Status.Allocation.Devices.Results[i].ConsumedCapacity = newShare("", turnsA,
				map[resourceapi.QualifiedName]string{"memory": memory, "smPercent": "0"}).Status.Allocation.Devices.Results[0].ConsumedCapacity
		}
		return claim
	}
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		"two shares of one": {set(newClaim("u1", turnsA, turnsA, turnsC)), []string{
			"env CUDA_DEVICE_MEMORY_LIMIT=1024m", "",
			"env CUDA_DEVICE_MEMORY_LIMIT=2048m", "",
			"env CUDA_DEVICE_MEMORY_LIMIT=3072m", "",
		}},
		"beside a whole one": {set(newClaim("u1", wholeA, turnsC)), []string{"", "env CUDA_DEVICE_MEMORY_LIMIT=2048m", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			mustPrepare(t, b.manager(), test.claim)
			expect.Same(t, b.limitsOfSpec("u1"), test.want)
		})
	}
}

// The folder is a claim's own; what is in it lasts as long as the claim, and no
// longer than the machine runs.
func TestLimitsFolder(t *testing.T) {
	b, m := newNode(t)
	claim := newClaim("u1", turnsC)
	mustPrepare(t, m, claim)
	folder := filepath.Join(b.dataDir(), "limits/u1")
	cache := filepath.Join(folder, "caches", turnsC+"-share-u1-r0", "usage.cache")
	write(t, cache, "counters")
	present := func() bool {
		found, err := filepath.Glob(cache)
		return err == nil && len(found) > 0
	}
	mustPrepare(t, b.manager(), claim)
	mustReconcile(t, m)
	if !present() {
		t.Error("what the library has written is gone while the claim is prepared")
	}
	b.boot("boot-2")
	m = b.manager()
	mustPrepare(t, m, claim)
	if present() {
		t.Error("the counters of processes of an earlier boot are left")
	}
	b.boot("boot-3")
	m = b.manager()
	mustUnprepare(t, b.bareManager(), "u1")
	b.wantNothing()

	// Without a library, claims that have had one can end and nothing else.
	mustPrepare(t, m, claim)
	without := b.manager()
	without.engine.Specs.Interposer = ""
	wantError(t, runPrepare(t.Context(), without, claim), "device "+turnsC, "--interposer-library")
	mustReconcile(t, without) // containers may be running with it
	b.endAll(without, "u1")
	wantError(t, runPrepare(t.Context(), without, claim), "device "+turnsC, "--interposer-library")
	b.wantNothing()
}

// No container could have the devices of such a request: that is said before the pod is
// there, and not by a container that does not start.
func TestDevicesOfOneRequest(t *testing.T) {
	b, m := newNode(t)
	together := func(devices ...string) *resourceapi.ResourceClaim {
		claim := newClaim("u1", devices...)
		for i := range claim.Status.Allocation.Devices.Results {
			claim.Status.Allocation.Devices.Results[i].Request = "both"
		}
		return claim
	}
	for _, devices := range [][]string{{mpsA, mpsB}, {mpsA, wholeC}, {turnsA, turnsA}} {
		wantError(t, runPrepare(t.Context(), m, together(devices...)), "request both", "container")
		b.wantNothing()
	}
	mustPrepare(t, m, together(wholeA, wholeC))
	b.endAll(m, "u1")
}
