// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
)

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
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, test.claim)
			if diff := cmp.Diff(test.want, b.edits("u1")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}

// A container with shares that the driver holds has a hook for each; one of two on the same GPU is refused before.
func TestSpecOfHeldShares(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	m.engine.Specs.Sockets = "/data/memory-limits"
	node := testNode()
	for i := range node.GPUs {
		node.GPUs[i].MemoryLimits = true
	}
	inventory, err := device.NewInventory(node, device.Terms{Policy: testPolicy()})
	if err != nil {
		t.Fatal(err)
	}
	m.SetInventory(inventory)
	mustPrepare(t, m, newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "0"}))
	want := []string{
		"env PARTAGE_GPU_63f4e2f3=" + turnsC + "-share-u1",
		"env PARTAGE_MEMORY_63f4e2f3=" + pciC,
		"hook /data/partage-hook partage-hook memory-limit --sockets /data/memory-limits --gpu " + pciC + " --uuid GPU-c --soft 6442450944 --hard 6442450944",
		"",
	}
	if diff := cmp.Diff(want, b.edits("u1")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	claim := newClaim("u2", turnsA, turnsA)
	for i := range claim.Status.Allocation.Devices.Results {
		claim.Status.Allocation.Devices.Results[i].Request = "both"
	}
	_, err = m.Prepare(t.Context(), claim)
	wantError(t, err, "request both", "several shares of one GPU")
	mustUnprepare(t, m, "u1")
	b.wantNothing()
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
		"two GPUs": {set(newClaim("u1", turnsC, turnsA)), []string{
			"env CUDA_DEVICE_MEMORY_LIMIT=2048m", "",
			"env CUDA_DEVICE_MEMORY_LIMIT=1024m", "",
		}},
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
			if diff := cmp.Diff(test.want, b.limitsOfSpec("u1")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// The folder is a claim's own; what is in it lasts as long as the claim, and no
// longer than the machine runs.
func TestLimitsFolder(t *testing.T) {
	b := newBox(t)
	m := b.manager()
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
	_, err := without.Prepare(t.Context(), claim)
	wantError(t, err, "device "+turnsC, "--interposer-library")
	mustReconcile(t, without) // containers may be running with it
	mustUnprepare(t, without, "u1")
	b.wantNothing()
	_, err = without.Prepare(t.Context(), claim)
	wantError(t, err, "device "+turnsC, "--interposer-library")
	b.wantNothing()
}

// What a hook or a mount would need must be there before a container is.
func TestNoHookProgram(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	m.engine.Specs.Hook = ""
	_, err := m.Prepare(t.Context(), newClaim("u1", mpsA))
	wantError(t, err, "device "+mpsA, "hook program")
	b.wantNothing()
}

// No container could have the devices of such a request: that is said before the pod is
// there, and not by a container that does not start.
func TestDevicesOfOneRequest(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	together := func(devices ...string) *resourceapi.ResourceClaim {
		claim := newClaim("u1", devices...)
		for i := range claim.Status.Allocation.Devices.Results {
			claim.Status.Allocation.Devices.Results[i].Request = "both"
		}
		return claim
	}
	for _, devices := range [][]string{{mpsA, mpsB}, {mpsA, wholeC}, {turnsA, turnsA}} {
		_, err := m.Prepare(t.Context(), together(devices...))
		wantError(t, err, "request both", "container")
		b.wantNothing()
	}
	mustPrepare(t, m, together(wholeA, wholeC))
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}
