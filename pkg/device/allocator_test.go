// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"context"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/partage-dev/partage/test/expect"
)

// scheduler is the real allocator of the Kubernetes scheduler over given
// slices, with the features that Kubernetes 1.37 has on by default. It keeps
// what it allocated.
type scheduler struct {
	t      testing.TB
	slices []*resourceapi.ResourceSlice
	cel    *cel.Cache
	// allocated are devices that one claim has alone, shares those that others have
	// some of, and consumed is how much of each.
	allocated sets.Set[structured.DeviceID]
	shares    sets.Set[structured.SharedDeviceID]
	consumed  structured.ConsumedCapacityCollection
}

// defaultFeatures are those of Kubernetes 1.37.
var defaultFeatures = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	PartitionableDevices: true, PrioritizedList: true,
}

// celCache is shared: compiling selectors is the larger part of the time.
var celCache = cel.NewCache(200, cel.Features{EnableConsumableCapacity: true})

func newScheduler(t testing.TB, objects []resourceapi.ResourceSlice) *scheduler {
	s := &scheduler{
		t: t, cel: celCache, allocated: sets.New[structured.DeviceID](),
		shares: sets.New[structured.SharedDeviceID](), consumed: structured.NewConsumedCapacityCollection(),
	}
	for n := range objects {
		s.slices = append(s.slices, &objects[n])
	}
	return s
}

// only leaves these devices in the slices. An allocator that can choose among
// them only is how a test names the device that it wants: the name is nothing
// that a selector can see. Counters are as published.
func (s *scheduler) only(devices ...string) *scheduler {
	restricted := *s
	restricted.slices = nil
	for _, object := range s.slices {
		kept := *object
		kept.Spec.Devices = nil
		for _, d := range object.Spec.Devices {
			if slices.Contains(devices, d.Name) {
				kept.Spec.Devices = append(kept.Spec.Devices, d)
			}
		}
		restricted.slices = append(restricted.slices, &kept)
	}
	return &restricted
}

// holding marks devices as allocated. Of those that are shared one claim has what
// it gets without asking.
func (s *scheduler) holding(devices ...string) *scheduler {
	held := s.clone()
	for _, d := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Device: d}
		if published, ok := s.find(d); ok && published.AllowMultipleAllocations != nil {
			result.ShareID = new(uuid.NewUUID())
			result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
			for name, c := range published.Capacity {
				result.ConsumedCapacity[name] = *c.RequestPolicy.Default
			}
		}
		held.keep(result)
	}
	return held
}

func (s *scheduler) find(device string) (resourceapi.Device, bool) {
	for _, object := range s.slices {
		for _, d := range object.Spec.Devices {
			if d.Name == device {
				return d, true
			}
		}
	}
	return resourceapi.Device{}, false
}

func (s *scheduler) clone() *scheduler {
	other := *s
	other.allocated, other.shares, other.consumed = s.allocated.Clone(), s.shares.Clone(), s.consumed.Clone()
	return &other
}

// keep what was allocated.
func (s *scheduler) keep(result resourceapi.DeviceRequestAllocationResult) {
	id := structured.MakeDeviceID(testOptions.Driver, testOptions.Pool, result.Device)
	if result.ShareID == nil {
		s.allocated.Insert(id)
		return
	}
	s.shares.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
	s.consumed.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
}

// List and Get make the class "any" and one for each type.
func (s *scheduler) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (s *scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if name != "any" {
		class.Spec.Selectors = celSelectors(
			`device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "` + name + `"`)
	}
	return class, nil
}

func celSelectors(expressions ...string) []resourceapi.DeviceSelector {
	var out []resourceapi.DeviceSelector
	for _, e := range expressions {
		out = append(out, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: e}})
	}
	return out
}

// request asks for count devices of a class that all selectors match.
func request(class string, count int64, selectors ...string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
		Selectors: celSelectors(selectors...),
	}}
}

// consuming asks for so much of each device's capacity.
func consuming(r resourceapi.DeviceRequest, amounts map[resourceapi.QualifiedName]string) resourceapi.DeviceRequest {
	exactly := *r.Exactly
	exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
	for name, amount := range amounts {
		exactly.Capacity.Requests[name] = resource.MustParse(amount)
	}
	r.Exactly = &exactly
	return r
}

// attempt is one scheduling attempt for claims of one request each. It returns
// the devices by claim, or nothing where they do not all fit.
func (s *scheduler) attempt(requests ...resourceapi.DeviceRequest) ([]resourceapi.AllocationResult, error) {
	var claims [][]resourceapi.DeviceRequest
	for _, r := range requests {
		claims = append(claims, []resourceapi.DeviceRequest{r})
	}
	return s.attemptClaims(claims...)
}

// attemptClaims is an attempt for claims of several requests.
func (s *scheduler) attemptClaims(requests ...[]resourceapi.DeviceRequest) ([]resourceapi.AllocationResult, error) {
	var claims []*resourceapi.ResourceClaim
	for n, own := range requests {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("claim-", n)}}
		for m, r := range own {
			r.Name = fmt.Sprint("r-", m)
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, r)
		}
		claims = append(claims, claim)
	}
	return s.allocateClaims(claims...)
}

// allocateClaims is an attempt for claims as they are.
func (s *scheduler) allocateClaims(claims ...*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	state := structured.AllocatedState{
		AllocatedDevices: s.allocated, AllocatedSharedDeviceIDs: s.shares, AggregatedCapacity: s.consumed,
	}
	ctx := context.Background()
	allocator, err := structured.NewAllocator(ctx, defaultFeatures, state, s, s.slices, s.cel)
	if err != nil {
		return nil, err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testOptions.NodeName}}
	return allocator.Allocate(ctx, node, claims)
}

// try is an attempt that is about the names of devices only.
func (s *scheduler) try(requests ...resourceapi.DeviceRequest) ([][]string, error) {
	results, err := s.attempt(requests...)
	var out [][]string
	for _, result := range results {
		var devices []string
		for _, r := range result.Devices.Results {
			devices = append(devices, r.Device)
		}
		out = append(out, devices)
	}
	return out, err
}

// allocate keeps the device of a request for one, or returns "".
func (s *scheduler) allocate(r resourceapi.DeviceRequest) string {
	s.t.Helper()
	result, _ := s.allocateOne(r)
	return result.Device
}

// allocateOne keeps the device of a request for one.
func (s *scheduler) allocateOne(r resourceapi.DeviceRequest) (resourceapi.DeviceRequestAllocationResult, bool) {
	s.t.Helper()
	claims, err := s.attempt(r)
	if err != nil {
		s.t.Fatal(err)
	}
	if len(claims) == 0 {
		return resourceapi.DeviceRequestAllocationResult{}, false
	}
	result := claims[0].Devices.Results[0]
	s.keep(result)
	return result, true
}

// TestAllocatorLegalLayouts allocates every maximal layout of every board
// claim by claim, after which nothing must be left, and compares a sample of
// all layouts with the hardware device by device. TestCountersAgainstHardware
// is the exhaustive version of that; this one ties the allocator to it.
func TestAllocatorLegalLayouts(t *testing.T) {
	anything := request("any", 1)
	for _, b := range partitionable(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			i := mustInventory(t, b.node)
			s := newScheduler(t, i.ResourceSlices(testOptions))
			mig := b.gpu().MIG
			layouts := 0
			visitLegal(mig, func(layout []PartitionShape) {
				layouts++
				full := maximal(mig, layout)
				if !full && layouts%40 != 1 {
					return
				}
				var held []string
				for _, shape := range layout {
					name := nameOf(t, i, shape)
					if got := s.only(append(held, name)...).holding(held...).allocate(anything); full && got != name {
						t.Errorf("%s beside %v: allocated %q", name, held, got)
					}
					held = append(held, name)
				}
				if full {
					expect.Same(t, s.holding(held...).allocate(anything), "", fmt.Sprint("beside the maximal layout ", held))
					return
				}
				h := &hardware{mig: mig, instances: layout}
				for _, d := range i.Devices() {
					if slices.Contains(held, d.Name) {
						continue
					}
					allowed := len(held) == 0
					if d.Partition != nil {
						allowed = h.allows(*d.Partition)
					}
					got := s.only(append(held, d.Name)...).holding(held...).allocate(anything)
					if (got == d.Name) != allowed {
						t.Errorf("%s beside %v: allocated %q, hardware says %t", d.Name, held, got, allowed)
					}
				}
			})
		})
	}
}

// TestAllocatorFirstFit checks the promise of the order on every board: with
// nothing but the whole list to choose from, the allocator takes the first
// device that the hardware allows.
func TestAllocatorFirstFit(t *testing.T) {
	for _, b := range partitionable(t) {
		t.Run(b.name, func(t *testing.T) {
			i := mustInventory(t, b.node)
			s := newScheduler(t, i.ResourceSlices(testOptions))
			h := &hardware{mig: b.gpu().MIG}
			for {
				want := ""
				for _, d := range i.Devices() {
					if d.Partition != nil && h.allows(*d.Partition) {
						want = d.Name
						h.instances = append(h.instances, *d.Partition)
						break
					}
				}
				if got := s.allocate(request("any", 1)); got != want {
					t.Fatalf("allocated %q, want %q", got, want)
				}
				if want == "" {
					return
				}
			}
		})
	}
}
