// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// scheduler is the allocator of the Kubernetes scheduler over the slices and claims of a
// snapshot.
type scheduler struct {
	t        *testing.T
	snapshot *Snapshot
	cel      *cel.Cache
}

func newScheduler(t *testing.T, s *Snapshot) *scheduler {
	return &scheduler{t: t, snapshot: s, cel: cel.NewCache(200, cel.Features{EnableConsumableCapacity: true})}
}

// List and Get make a class of everything.
func (*scheduler) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (*scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

// allocate asks for the devices of each of the claims at once, of those that keep says.
func (s *scheduler) allocate(keep func(*resourceapi.Device) bool, requests ...resourceapi.DeviceRequest) []resourceapi.AllocationResult {
	s.t.Helper()
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	held := sets.New[string]()
	for _, c := range s.snapshot.Claims {
		for _, r := range c.Status.Allocation.Devices.Results {
			if ptr.Deref(r.AdminAccess, false) {
				continue
			}
			held.Insert(r.Device)
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	var objects []*resourceapi.ResourceSlice
	for _, o := range s.snapshot.Slices {
		o = o.DeepCopy()
		// What is held stays: it consumes counters.
		o.Spec.Devices = slices.DeleteFunc(o.Spec.Devices, func(d resourceapi.Device) bool { return !keep(&d) && !held.Has(d.Name) })
		for i := range o.Spec.Devices {
			d := &o.Spec.Devices[i]
			for _, rule := range s.snapshot.TaintRules {
				if selector := rule.Spec.DeviceSelector; selector != nil && ptr.Deref(selector.Device, d.Name) == d.Name {
					d.Taints = append(d.Taints, rule.Spec.Taint)
				}
			}
			if !keep(d) {
				d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: "test/not-asked-for", Effect: resourceapi.DeviceTaintEffectNoSchedule})
			}
		}
		objects = append(objects, o)
	}
	var claims []*resourceapi.ResourceClaim
	for i, r := range requests {
		claims = append(claims, &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: fmt.Sprint("asks-", i)},
			Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{r}}},
		})
	}
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true,
	}
	allocator, err := structured.NewAllocator(s.t.Context(), features, state, s, objects, s.cel)
	if err != nil {
		s.t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: objects[0].Spec.Pool.Name}}
	results, err := allocator.Allocate(s.t.Context(), node, claims)
	if err != nil {
		s.t.Fatal(err)
	}
	return results
}

func request(count int64, capacity map[resourceapi.QualifiedName]resource.Quantity) resourceapi.DeviceRequest {
	r := &resourceapi.ExactDeviceRequest{DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if capacity != nil {
		r.Capacity = &resourceapi.CapacityRequirements{Requests: capacity}
	}
	return resourceapi.DeviceRequest{Name: "gpu", Exactly: r}
}

// claimOf is a claim with the given allocation.
func claimOf(name string, allocation resourceapi.AllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &allocation},
	}
}

// text is an attribute of a device.
func text(d *resourceapi.Device, name resourceapi.QualifiedName) string {
	return ptr.Deref(d.Attributes[name].StringValue, "")
}

// TestFreeAgainstTheAllocator: what is said to be free is what the scheduler's allocator would
// give, for every kind of slices, while claims come one after the other, with what is tainted.
func TestFreeAgainstTheAllocator(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../device/testdata/slices/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("there are only %d golden files", len(files))
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			states := 0
			for seed := range uint64(3) {
				random := rand.New(rand.NewPCG(seed, 0)) // #nosec G404 -- a sequence that repeats
				s := &Snapshot{Slices: slicesOf(t, file)}
				if seed == 2 {
					device := s.Slices[len(s.Slices)-1].Spec.Devices[0].Name
					s.TaintRules = append(s.TaintRules, ruleOf("broken", device, resourceapi.DeviceTaintEffectNoExecute), ruleOf("to-know", "", resourceapi.DeviceTaintEffectNone))
				}
				for checkFree(t, s) && allocateAny(t, s, random) {
					states++
				}
			}
			if states < 3 {
				t.Errorf("only %d states", states)
			}
		})
	}
}

func ruleOf(name, device string, effect resourceapi.DeviceTaintEffect) *resourceapi.DeviceTaintRule {
	r := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: name}}
	r.Spec.Taint = resourceapi.DeviceTaint{Key: "example.com/" + name, Effect: effect}
	r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{}
	if device != "" {
		r.Spec.DeviceSelector.Device = &device
	}
	return r
}

// allocateAny has the allocator give some device to a new claim.
func allocateAny(t *testing.T, s *Snapshot, random *rand.Rand) bool {
	t.Helper()
	var all []string
	for _, o := range s.Slices {
		for _, d := range o.Spec.Devices {
			all = append(all, d.Name)
		}
	}
	for _, i := range random.Perm(len(all)) {
		capacity := map[resourceapi.QualifiedName]resource.Quantity{}
		keep := func(d *resourceapi.Device) bool {
			if d.Name == all[i] && d.AllowMultipleAllocations != nil && random.IntN(2) == 0 {
				capacity[CapacityMemory] = *resource.NewQuantity(1+random.Int64N(1<<34), resource.BinarySI)
			}
			return d.Name == all[i]
		}
		r := request(1, capacity)
		if got := newScheduler(t, s).allocate(keep, r); len(got) == 1 {
			s.Claims = append(s.Claims, claimOf(fmt.Sprint("claim-", len(s.Claims)), got[0]))
			return true
		}
	}
	return false
}

// checkFree compares Free with the allocator.
func checkFree(t *testing.T, s *Snapshot) bool {
	t.Helper()
	model := New(s, "gpu.nvidia.com")
	g, a := model.Nodes[0].GPUs[0], newScheduler(t, s)
	room := Free(g)
	var held []string
	for _, h := range model.Holdings {
		held = append(held, h.Result.Device)
	}

	whole := func(d *resourceapi.Device) bool { return text(d, "type") == TypeGPU }
	if got := len(a.allocate(whole, request(1, nil))) == 1; got != room.Whole {
		t.Errorf("beside %v: the whole GPU is free: %v, by the allocator %v", held, room.Whole, got)
	}
	counts := map[string]int{}
	for _, p := range room.Partitions {
		counts[p.Profile] = p.Count
	}
	profiles := map[string]bool{}
	for _, d := range g.Devices {
		if d.Type == TypeMIG {
			profiles[d.Profile] = true
		}
	}
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		is := func(d *resourceapi.Device) bool { return text(d, "type") == TypeMIG && text(d, "profile") == profile }
		n := counts[profile]
		if n > 0 && len(a.allocate(is, request(int64(n), nil))) != 1 || len(a.allocate(is, request(int64(n+1), nil))) != 0 {
			t.Errorf("beside %v: %d of %s are said to be free; the allocator disagrees", held, n, profile)
		}
	}
	for _, d := range g.Devices {
		if d.Shared() {
			checkShare(t, a, d, room, held)
		}
	}
	return !t.Failed()
}

func checkShare(t *testing.T, a *scheduler, d *Device, room Room, held []string) {
	t.Helper()
	one := func(o *resourceapi.Device) bool { return o.Name == d.Name }
	fits := func(memory, percent int64) bool {
		capacity := map[resourceapi.QualifiedName]resource.Quantity{
			CapacityMemory: *resource.NewQuantity(memory, resource.BinarySI), CapacitySMPercent: *resource.NewQuantity(percent, resource.DecimalSI),
		}
		return len(a.allocate(one, request(1, capacity))) == 1
	}
	i := slices.IndexFunc(room.Shares, func(r ShareRoom) bool { return r.Device == d })
	if i < 0 {
		if fits(1, 1) {
			t.Errorf("beside %v: nothing of %s is said to be free; the allocator gives some", held, d.Name)
		}
		return
	}
	r := room.Shares[i]
	if n := r.Count; n > 0 && len(a.allocate(one, slices.Repeat([]resourceapi.DeviceRequest{request(1, nil)}, n)...)) != n ||
		len(a.allocate(one, slices.Repeat([]resourceapi.DeviceRequest{request(1, nil)}, n+1)...)) != 0 {
		t.Errorf("beside %v: %d shares of %s are said to be free; the allocator disagrees", held, n, d.Name)
	}
	if !fits(r.MemoryBytes, min(1, r.SMPercent)) || fits(r.MemoryBytes+1, min(1, r.SMPercent)) {
		t.Errorf("beside %v: %d bytes of %s are said to be free; the allocator disagrees", held, r.MemoryBytes, d.Name)
	}
	if !fits(min(1, r.MemoryBytes), r.SMPercent) || fits(min(1, r.MemoryBytes), r.SMPercent+1) {
		t.Errorf("beside %v: %d %% of %s are said to be free; the allocator disagrees", held, r.SMPercent, d.Name)
	}
}

// TestFreeOfAnIncompletePool: the scheduler allocates nothing of it.
func TestFreeOfAnIncompletePool(t *testing.T) {
	t.Parallel()
	all := slicesOf(t, board("h100-80-sxm"))
	for _, o := range all {
		o.Spec.Pool.ResourceSliceCount++
	}
	s := &Snapshot{Slices: all}
	g := New(s, "gpu.nvidia.com").Nodes[0].GPUs[0]
	if !g.Node.Incomplete || !Free(g).Nothing() {
		t.Errorf("incomplete: %v, free: %+v", g.Node.Incomplete, Free(g))
	}
	checkFree(t, s)
}

// TestFreeBesideAdmin: a claim with admin access takes nothing.
func TestFreeBesideAdmin(t *testing.T) {
	t.Parallel()
	s := &Snapshot{Slices: slicesOf(t, board("h100-80-sxm"))}
	before := Free(New(s, "gpu.nvidia.com").Nodes[0].GPUs[0])
	s.Claims = append(s.Claims, claimOf("admin", resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0000-1b-00-0", AdminAccess: new(true)}},
	}}))
	after := Free(New(s, "gpu.nvidia.com").Nodes[0].GPUs[0])
	if !after.Whole || len(after.Partitions) != len(before.Partitions) {
		t.Errorf("before %+v, after %+v", before, after)
	}
	checkFree(t, s)
}
