// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/policy"
)

const nodeName = "node-1"

// celCache is shared: compiling selectors is the larger part of the time.
var celCache = cel.NewCache(200, cel.Features{EnableConsumableCapacity: true})

// cluster is one node with the real allocator of the scheduler. It keeps what it allocated.
type cluster struct {
	slices    []*resourceapi.ResourceSlice
	classes   map[string]*resourceapi.DeviceClass
	allocated sets.Set[structured.DeviceID]
	shares    sets.Set[structured.SharedDeviceID]
	consumed  structured.ConsumedCapacityCollection
}

// newCluster has GPUs of some boards, as a policy publishes them, and the chart's classes.
func newCluster(t testing.TB, policyFile []byte, boards ...string) *cluster {
	t.Helper()
	offered, err := policy.Decode(policyFile)
	if err != nil {
		t.Fatalf("%v\n%s", err, policyFile)
	}
	var node *gpu.Node
	for i, board := range boards {
		own := loadNode(t, strings.TrimSuffix(board, "-mig"))
		g := own.GPUs[0]
		g.PCIAddress = fmt.Sprintf("0000:%02x:00.0", 0x1b+i)
		g.UUID = fmt.Sprintf("%s%02d", g.UUID[:len(g.UUID)-2], i)
		if strings.HasSuffix(board, "-mig") {
			g.MIG.Enabled = true
		}
		if node == nil {
			node = own
			node.GPUs = nil
		}
		node.GPUs = append(node.GPUs, g)
	}
	inventory, err := device.NewInventory(node, device.Terms{Policy: offered, ExtendedResources: true})
	if err != nil {
		t.Logf("what cannot be offered: %v", err)
	}
	c := &cluster{
		classes: chartClasses(t), allocated: sets.New[structured.DeviceID](),
		shares: sets.New[structured.SharedDeviceID](), consumed: structured.NewConsumedCapacityCollection(),
	}
	published := inventory.ResourceSlices(device.Options{
		Driver: "gpu.nvidia.com", Pool: nodeName, NodeName: nodeName, PartitionableDevices: true, ConsumableCapacity: true,
	})
	for i := range published {
		c.slices = append(c.slices, &published[i])
	}
	return c
}

func loadNode(t testing.TB, board string) *gpu.Node {
	t.Helper()
	node, err := boards.Load(board)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// chart has what the chart makes with its default values, once it is read.
var chart map[string]*resourceapi.DeviceClass

// chartClasses are those that the chart makes with its default values.
func chartClasses(t testing.TB) map[string]*resourceapi.DeviceClass {
	t.Helper()
	if chart != nil {
		return maps.Clone(chart)
	}
	rendered, err := os.ReadFile("../../../deployments/helm/testdata/defaults.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	classes := map[string]*resourceapi.DeviceClass{}
	for _, text := range documents(t, rendered) {
		if class := decodeAs[resourceapi.DeviceClass](t, text, "DeviceClass"); class != nil {
			classes[class.Name] = class
		}
	}
	if len(classes) != 7 {
		t.Fatalf("the chart makes %d classes, want 7: %v", len(classes), slices.Sorted(maps.Keys(classes)))
	}
	chart = classes
	return maps.Clone(chart)
}

// documents are those of a stream that have some content.
func documents(t testing.TB, stream []byte) [][]byte {
	t.Helper()
	split, err := document.Split(stream)
	if err != nil {
		t.Fatal(err)
	}
	var texts [][]byte
	for _, d := range split {
		if object, err := yaml.YAMLToJSON(d.Text); err != nil {
			t.Fatalf("%v\n%s", err, d.Text)
		} else if !bytes.Equal(object, []byte("null")) {
			texts = append(texts, d.Text)
		}
	}
	return texts
}

// decodeAs decodes strictly what is of one kind, and returns nil for all else.
func decodeAs[T any](t testing.TB, text []byte, kind string) *T {
	t.Helper()
	var meta metav1.TypeMeta
	if err := yaml.Unmarshal(text, &meta); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if meta.Kind != kind {
		return nil
	}
	object := new(T)
	if err := yaml.UnmarshalStrict(text, object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return object
}

// List and Get are for the allocator.
func (c *cluster) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (c *cluster) Get(name string) (*resourceapi.DeviceClass, error) {
	class, ok := c.classes[name]
	if !ok {
		return nil, fmt.Errorf("there is no device class %s", name)
	}
	return class, nil
}

// allocate keeps the devices of a claim, and returns what each of them is: "mig 1g.10gb". It
// returns nothing where they do not fit.
func (c *cluster) allocate(t testing.TB, spec resourceapi.ResourceClaimSpec) []string {
	t.Helper()
	// The API server fills in what is left out.
	for i := range spec.Devices.Requests {
		if exactly := spec.Devices.Requests[i].Exactly; exactly != nil && exactly.AllocationMode == "" {
			exactly.AllocationMode = resourceapi.DeviceAllocationModeExactCount
			exactly.Count = max(1, exactly.Count)
		}
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"}, Spec: spec}
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true,
	}
	state := structured.AllocatedState{AllocatedDevices: c.allocated, AllocatedSharedDeviceIDs: c.shares, AggregatedCapacity: c.consumed}
	allocator, err := structured.NewAllocator(t.Context(), features, state, c, c.slices, celCache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatalf("allocate %+v: %v", spec.Devices.Requests, err)
	}
	if len(results) == 0 {
		return nil
	}
	var got []string
	for _, r := range results[0].Devices.Results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID == nil {
			c.allocated.Insert(id)
		} else {
			c.shares.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			c.consumed.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
		got = append(got, c.describe(r.Device))
	}
	return got
}

// describe returns type, profile and product of a device, without what is empty.
func (c *cluster) describe(name string) string {
	for _, slice := range c.slices {
		for _, d := range slice.Spec.Devices {
			if d.Name != name {
				continue
			}
			parts := []string{*d.Attributes["type"].StringValue, *d.Attributes["profile"].StringValue, *d.Attributes["productName"].StringValue}
			return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), " ")
		}
	}
	return "unknown " + name
}

// request is a claim for devices of a class.
func request(class string, count int64) resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Count: count, AllocationMode: resourceapi.DeviceAllocationModeExactCount}},
	}}}
}
