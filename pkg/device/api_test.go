// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/policy"
)

// semver is the regular expression of semver.org, which the API server uses.
var semver = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?` +
	`(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$`)

// checkAPI holds slices of one pool against the limits of the API on numbers and names, and the
// references that the allocator checks. test/validation lets an API server's own code judge the rest.
func checkAPI(t *testing.T, objects []resourceapi.ResourceSlice) {
	t.Helper()
	objectNames, deviceNames := sets.New[string](), sets.New[string]()
	counterSets := map[string]resourceapi.CounterSet{}
	unique := func(what, name string, known sets.Set[string]) {
		if known.Has(name) {
			t.Errorf("%s %s is there twice", what, name)
		}
		known.Insert(name)
	}
	setNames := sets.New[string]()
	for _, object := range objects {
		unique("slice", object.Name, objectNames)
		for _, set := range object.Spec.SharedCounters {
			unique("counter set", set.Name, setNames)
			counterSets[set.Name] = set
			checkCounterSet(t, set)
		}
	}
	for _, object := range objects {
		checkSlice(t, object, len(objects))
		for _, d := range object.Spec.Devices {
			unique("device", d.Name, deviceNames)
			checkDevice(t, d)
			checkTaints(t, d)
			checkConsumption(t, d, counterSets)
		}
	}
}

func checkSlice(t *testing.T, object resourceapi.ResourceSlice, sliceCount int) {
	t.Helper()
	if object.APIVersion != "resource.k8s.io/v1" || object.Kind != "ResourceSlice" {
		t.Errorf("%s is a %s of %s", object.Name, object.Kind, object.APIVersion)
	}
	spec := object.Spec
	if spec.Pool != (resourceapi.ResourcePool{Name: "node-1", Generation: 1, ResourceSliceCount: int64(sliceCount)}) {
		t.Errorf("%s: pool %+v", object.Name, spec.Pool)
	}
	if spec.NodeName == nil || *spec.NodeName != "node-1" || spec.Driver != "gpu.nvidia.com" {
		t.Errorf("%s: node or driver", object.Name)
	}
	if spec.Devices != nil && spec.SharedCounters != nil {
		t.Errorf("%s has devices and counters", object.Name)
	}
	if len(spec.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets {
		t.Errorf("%s has %d counter sets", object.Name, len(spec.SharedCounters))
	}
	most := resourceapi.ResourceSliceMaxDevices
	if slices.ContainsFunc(spec.Devices, func(d resourceapi.Device) bool { return len(d.ConsumesCounters)+len(d.Taints) > 0 }) {
		most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	if len(spec.Devices) > most {
		t.Errorf("%s has %d devices", object.Name, len(spec.Devices))
	}
}

func checkCounterSet(t *testing.T, set resourceapi.CounterSet) {
	t.Helper()
	if n := len(set.Counters); n < 1 || n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		t.Errorf("counter set %s has %d counters", set.Name, n)
	}
	for name, c := range set.Counters {
		if len(validation.IsDNS1123Label(name)) > 0 || c.Value.Sign() <= 0 {
			t.Errorf("counter %q of %s is %s", name, set.Name, c.Value.String())
		}
	}
}

func checkDevice(t *testing.T, d resourceapi.Device) {
	t.Helper()
	for _, problem := range validation.IsDNS1123Label(d.Name) {
		t.Errorf("%q: %s", d.Name, problem)
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		t.Errorf("%s has %d attributes and capacities", d.Name, n)
	}
	for name, a := range d.Attributes {
		if a.StringValue != nil && len(*a.StringValue) > resourceapi.DeviceAttributeMaxValueLength {
			t.Errorf("%s: %s is too long", d.Name, name)
		}
		if v := a.VersionValue; v != nil && (len(*v) > resourceapi.DeviceAttributeMaxValueLength || !semver.MatchString(*v)) {
			t.Errorf("%s: %s is %q", d.Name, name, *v)
		}
	}
	for name, c := range d.Capacity {
		// Without a policy a claim that does not ask takes everything.
		if shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations; shared != (c.RequestPolicy != nil) || c.Value.Sign() < 0 {
			t.Errorf("%s: capacity %s: %+v", d.Name, name, c)
		}
	}
}

func checkTaints(t *testing.T, d resourceapi.Device) {
	t.Helper()
	if len(d.Taints) > resourceapi.DeviceTaintsMaxLength {
		t.Errorf("%s has %d taints", d.Name, len(d.Taints))
	}
	keys := sets.New[string]()
	for _, taint := range d.Taints {
		if keys.Has(taint.Key) || taint.Effect == "" || taint.TimeAdded != nil {
			t.Errorf("taint %+v of %s is there twice or not as expected", taint, d.Name)
		}
		keys.Insert(taint.Key)
	}
}

func checkConsumption(t *testing.T, d resourceapi.Device, counterSets map[string]resourceapi.CounterSet) {
	t.Helper()
	if len(d.ConsumesCounters) > resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice {
		t.Errorf("%s consumes from %d counter sets", d.Name, len(d.ConsumesCounters))
	}
	for _, consumption := range d.ConsumesCounters {
		if n := len(consumption.Counters); n < 1 || n > resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption {
			t.Errorf("%s consumes %d counters", d.Name, n)
		}
		for name, c := range consumption.Counters {
			total, ok := counterSets[consumption.CounterSet].Counters[name]
			if !ok || c.Value.Sign() <= 0 || c.Value.Cmp(total.Value) > 0 {
				t.Errorf("%s consumes %s of counter %s/%s", d.Name, c.Value.String(), consumption.CounterSet, name)
			}
		}
	}
}

func TestAPILimits(t *testing.T) {
	for _, b := range testBoards(t) {
		for _, n := range []int{1, 8, 16} {
			i := mustInventory(t, replicate(b.node, n))
			objects := i.ResourceSlices(testOptions)
			checkAPI(t, objects)
			if want := n + (n+7)/8; len(objects) != want {
				t.Errorf("%d x %s: %d slices, want %d", n, b.name, len(objects), want)
			}
			// What the helper publishes is the same.
			pools := i.DriverResources(testOptions).Pools
			if len(pools) != 1 || len(pools["node-1"].Slices) != len(objects) || pools["node-1"].Generation != 0 {
				t.Fatalf("%d x %s: pools %v", n, b.name, pools)
			}
			for m, s := range pools["node-1"].Slices {
				if diff := cmp.Diff(objects[m].Spec.Devices, s.Devices); diff != "" {
					t.Errorf("devices of slice %d differ:\n%s", m, diff)
				}
				if diff := cmp.Diff(objects[m].Spec.SharedCounters, s.SharedCounters); diff != "" {
					t.Errorf("counters of slice %d differ:\n%s", m, diff)
				}
			}
		}
	}
}

// namesOfAll are attributes and capacities that every device has, so that a selector can read them
// in any class.
var namesOfAll = []resourceapi.QualifiedName{
	"type", "isolation", "memoryLimit", "parentUUID", "uuid", "profile",
	"productName", "brand", "architecture", "cudaComputeCapability", "driverVersion", "cudaDriverVersion", "addressingMode",
	"resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode",
	"memory", "multiprocessors",
}

// namesOfKind are what else devices of a kind have, so that a selector can read them in a class of
// that kind.
var namesOfKind = map[Kind][]resourceapi.QualifiedName{
	Whole:     {"smPercent", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"},
	Partition: {"copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"},
	MPS:       {"smPercent", "shares"},
	TimeSlice: {"smPercent", "shares"},
	Observer:  nil,
}

// TestNames: all devices of a kind have the same attributes and capacities, on every board and
// under every policy.
func TestNames(t *testing.T) {
	shares := sharing(policy.PartitionShares{Profiles: []string{"1g.5gb", "1g.6gb", "1g.10gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)})
	seen := map[Kind]int{}
	for _, b := range testBoards(t) {
		for _, terms := range []Terms{{}, everything, shares} {
			i := inventoryOf(t, b.node, terms).With(Status{Static: []Static{firstPartition(b.gpu())}})
			for _, object := range i.ResourceSlices(testOptions) {
				for _, d := range object.Spec.Devices {
					kind := Kind(*d.Attributes["type"].StringValue)
					seen[kind]++
					want := sets.New(namesOfAll...).Insert(namesOfKind[kind]...)
					if got := sets.KeySet(d.Attributes).Union(sets.KeySet(d.Capacity)); !got.Equal(want) {
						t.Errorf("%s: %s has %v, want %v", b.name, d.Name, sets.List(got), sets.List(want))
					}
				}
			}
		}
	}
	if t.Logf("%v", seen); len(seen) != len(namesOfKind) || seen[Partition] < 200 {
		t.Errorf("only %v", seen)
	}
}
