// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/scale/slices/reference"
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
	expect.Same(t, spec.Pool, (resourceapi.ResourcePool{Name: "node-1", Generation: 1, ResourceSliceCount: int64(sliceCount)}), object.Name+": pool")
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
				expect.Same(t, s.Devices, objects[m].Spec.Devices, fmt.Sprint("devices of slice ", m))
				expect.Same(t, s.SharedCounters, objects[m].Spec.SharedCounters, fmt.Sprint("counters of slice ", m))
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

// TestAttributesOf: they are those that are published, and the caller's.
func TestAttributesOf(t *testing.T) {
	inventory := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 1))
	published := map[string]bool{}
	for _, slice := range inventory.ResourceSlices(Options{Driver: "d", Pool: "p", NodeName: "n", PartitionableDevices: true, ConsumableCapacity: true}) {
		for _, d := range slice.Spec.Devices {
			published[d.Name] = true
			got := inventory.AttributesOf(d.Name)
			expect.Same(t, got, d.Attributes, "attributes of "+d.Name)
			clear(got)
		}
	}
	if len(published) == 0 || inventory.AttributesOf("gpu-that-is-not-there") != nil {
		t.Errorf("%d devices are published", len(published))
	}
	for name := range published {
		if len(inventory.AttributesOf(name)) == 0 {
			t.Errorf("%s has lost its attributes", name)
		}
	}
}

// TestKnowsExtendedResources: by the version, however a distribution writes it, and never by a guess.
func TestKnowsExtendedResources(t *testing.T) {
	for kubelet, want := range map[string]bool{
		"v1.34.0": false, "v1.35.9": false, "v1.35.12-gke.1100": false, "v1.36.0": true, "v1.36.0-eks-3025e55": true,
		"v1.36.2+k3s1": true, "1.37.1": true, "v2.0.0": true,
	} {
		if got, err := KnowsExtendedResources(kubelet); err != nil || got != want {
			t.Errorf("%s: got %t, %v, want %t", kubelet, got, err, want)
		}
	}
	for _, kubelet := range []string{"", "unknown", "v", "v1.x"} {
		if got, err := KnowsExtendedResources(kubelet); err == nil || got {
			t.Errorf("%q: got %t, %v, want an error", kubelet, got, err)
		}
	}
}

// TestExtendedResourcesAttribute: all devices that a pod can have by a resource have it where the kubelet knows them, and none
// elsewhere.
func TestExtendedResourcesAttribute(t *testing.T) {
	seen := map[Kind]int{}
	for _, b := range testBoards(t) {
		for _, knows := range []bool{false, true} {
			terms := everything
			terms.ExtendedResources = knows
			for _, object := range inventoryOf(t, b.node, terms).ResourceSlices(testOptions) {
				for _, d := range object.Spec.Devices {
					kind := Kind(*d.Attributes["type"].StringValue)
					seen[kind]++
					attribute, has := d.Attributes[ExtendedResources]
					if has != (knows && kind != Observer) || has && (attribute.BoolValue == nil || !*attribute.BoolValue) {
						t.Errorf("%s, known %t: %s has %v", b.name, knows, d.Name, attribute)
					}
				}
			}
		}
	}
	expect.Same(t, len(seen), 5, fmt.Sprint(seen))
}

// namesIn are the attributes that say something and the capacities of devices, by their type.
func namesIn(objects []resourceapi.ResourceSlice) map[string][]resourceapi.QualifiedName {
	names := map[string][]resourceapi.QualifiedName{}
	for _, d := range devicesOf(objects) {
		var own []resourceapi.QualifiedName
		for name, value := range d.Attributes {
			if value.StringValue == nil || *value.StringValue != "" {
				own = append(own, name)
			}
		}
		for name := range d.Capacity {
			own = append(own, name)
		}
		names[*d.Attributes["type"].StringValue] = own
	}
	return names
}

// TestNamesOfReferenceDriver: a selector that reads a name which a device does not have is an error that ends
// the pod's scheduling. So whole GPUs and partitions have every attribute and capacity that NVIDIA's driver
// gives them.
func TestNamesOfReferenceDriver(t *testing.T) {
	compared := 0
	for _, name := range boards.Names() {
		node := loadNode(t, name)
		withMIG := replicate(node, 1)
		withMIG.GPUs[0].MIG = cmp.Or(withMIG.GPUs[0].MIG, &gpu.MIG{}) // what is not there has no partitions
		theirs := namesIn(reference.Pool{Driver: testOptions.Driver, Node: testOptions.NodeName}.ResourceSlices(withMIG))
		for _, d := range devicesOf(inventoryOf(t, node, Terms{}).ResourceSlices(testOptions)) {
			for _, wanted := range theirs[*d.Attributes["type"].StringValue] {
				compared++
				_, is := d.Attributes[wanted]
				_, isCapacity := d.Capacity[wanted]
				if !is && !isCapacity {
					t.Errorf("NVIDIA's driver publishes %s, and %s of %s does not have it", wanted, d.Name, name)
				}
			}
		}
	}
	if t.Logf("%d names compared", compared); compared < 2000 {
		t.Errorf("only %d names were compared", compared)
	}
}
