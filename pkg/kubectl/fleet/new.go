// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

// Counters of a GPU: one for each memory slice, of which this is the beginning of the name, and
// its memory in bytes.
const (
	memorySliceCounter = "memory-slice-"
	memoryCounter      = "memory"
)

// New makes the model of a driver's part of a snapshot. Of each pool it takes the newest
// generation, as the scheduler does.
func New(s *Snapshot, driver string) *Model {
	b := &builder{
		model:   &Model{Snapshot: s, Driver: driver},
		nodes:   map[string]*Node{},
		gpus:    map[gpuKey]*GPU{},
		devices: map[deviceKey]*Device{},
	}
	b.addDevices()
	b.addHoldings()
	b.sort()
	return b.model
}

// gpuKey is one of the texts by which a GPU is known: an address, a UUID, or a name.
type gpuKey struct{ node, id string }

type deviceKey struct{ pool, device string }

type builder struct {
	model   *Model
	nodes   map[string]*Node
	gpus    map[gpuKey]*GPU
	devices map[deviceKey]*Device
}

// Incomplete reports whether a pool is there, and not all slices of its newest generation: it is not known what it has.
func (m *Model) Incomplete(pool string) bool {
	newest, complete := generation.Newest(slices.DeleteFunc(slices.Clone(m.Slices), func(s *resourceapi.ResourceSlice) bool {
		return s.Spec.Driver != m.Driver || s.Spec.Pool.Name != pool
	}))
	return len(newest) > 0 && !complete
}

// addDevices adds nodes, GPUs and devices.
func (b *builder) addDevices() {
	objects := map[string]*corev1.Node{}
	for _, n := range b.model.Snapshot.Nodes {
		objects[n.Name] = n
	}
	atLeast := b.model.Hides(ResourceClaims)
	hidden := atLeast || b.model.Hides(ResourceTaintRules)
	pools := map[string][]*resourceapi.ResourceSlice{}
	for _, s := range b.model.Slices {
		if s.Spec.Driver == b.model.Driver {
			pools[s.Spec.Pool.Name] = append(pools[s.Spec.Pool.Name], s)
		}
	}
	for _, pool := range slices.Sorted(maps.Keys(pools)) {
		newest, complete := generation.Newest(pools[pool])
		counters := CountersOf(newest)
		for _, slice := range newest {
			name := ptr.Deref(slice.Spec.NodeName, "")
			node := b.nodes[name]
			if node == nil {
				node = &Node{Name: name, Object: objects[name], Hidden: hidden, AtLeast: atLeast}
				b.nodes[name] = node
				b.model.Nodes = append(b.model.Nodes, node)
			}
			node.Incomplete = node.Incomplete || !complete
			for i := range slice.Spec.Devices {
				b.addDevice(node, pool, &slice.Spec.Devices[i], counters)
			}
		}
	}
}

func (b *builder) addDevice(node *Node, pool string, published *resourceapi.Device, counters Counters) {
	d := &Device{
		Pool: pool, Name: published.Name, Published: published,
		Type:      b.text(published, "type"),
		Profile:   b.text(published, "profile"),
		UUID:      b.text(published, "uuid"),
		Isolation: b.text(published, "isolation"),
		Taints:    slices.Clone(published.Taints),
	}
	for _, rule := range b.model.TaintRules {
		if RuleCovers(rule, b.model.Driver, pool, published.Name) {
			d.Taints = append(d.Taints, rule.Spec.Taint)
		}
	}
	set := ""
	for _, c := range published.ConsumesCounters {
		if set = c.CounterSet; d.Profile != "" {
			d.Placement = append(d.Placement, memorySlices(c.Counters)...)
		}
	}
	g := b.gpuOf(node, published, set)
	// An observer consumes no counters, and may come first.
	if set != "" && g.counters == nil {
		g.Name, g.counters, g.Cells = set, counters[set], memorySlices(counters[set])
	}
	// A partition that leaves room for no other may consume the memory only.
	if d.Profile != "" && len(d.Placement) == 0 {
		d.Placement = slices.Clone(g.Cells)
	}
	switch memory, has := g.counters[memoryCounter]; {
	case has:
		g.MemoryBytes = memory / 1000
	case !d.Shared():
		// A share may be promised more than there is.
		g.MemoryBytes = max(g.MemoryBytes, d.Capacity(CapacityMemory))
	}
	d.GPU = g
	g.Devices = append(g.Devices, d)
	b.devices[deviceKey{pool, d.Name}] = d
}

// gpuOf returns the GPU that a device is of, or a part of. Which attributes tell depends on the
// kind of the device and on the driver, so it is known by all of them, and by the name.
func (b *builder) gpuOf(node *Node, d *resourceapi.Device, set string) *GPU {
	address := cmp.Or(ptr.Deref(d.Attributes[deviceattribute.StandardDeviceAttributePCIBusID].StringValue, ""), device.AddressIn(d.Name))
	uuid := b.text(d, "parentUUID")
	if uuid == "" && b.text(d, "type") == TypeGPU {
		uuid = b.text(d, "uuid")
	}
	ids := slices.DeleteFunc([]string{address, uuid, set}, func(id string) bool { return id == "" })
	if len(ids) == 0 {
		ids = []string{d.Name}
	}
	var g *GPU
	for _, id := range ids {
		g = cmp.Or(g, b.gpus[gpuKey{node.Name, id}])
	}
	if g == nil {
		g = &GPU{
			Node: node, Name: d.Name, UUID: uuid, ProductName: b.text(d, "productName"), Architecture: b.text(d, "architecture"),
			DriverVersion: b.text(d, "driverVersion"), CUDAVersion: b.text(d, "cudaDriverVersion"),
		}
		node.GPUs = append(node.GPUs, g)
	}
	for _, id := range ids {
		b.gpus[gpuKey{node.Name, id}] = g
	}
	g.PCIBusID = cmp.Or(g.PCIBusID, address)
	return g
}

// memorySlices returns the memory slices that counters are of, in ascending order.
func memorySlices[C any](counters map[string]C) []int {
	var indexes []int
	for name := range counters {
		if number, is := strings.CutPrefix(name, memorySliceCounter); is {
			if index, err := strconv.Atoi(number); err == nil {
				indexes = append(indexes, index)
			}
		}
	}
	slices.Sort(indexes)
	return indexes
}

// addHoldings adds what claims have, and whose pods they are reserved for.
func (b *builder) addHoldings() {
	pods := map[types.UID]*corev1.Pod{}
	for _, p := range b.model.Pods {
		pods[p.UID] = p
	}
	for _, c := range b.model.Claims {
		var users []*corev1.Pod
		for _, u := range c.Status.ReservedFor {
			if p := pods[u.UID]; p != nil {
				users = append(users, p)
			}
		}
		for _, result := range Results(c, b.model.Driver) {
			h := &Holding{Claim: c, Result: result, Pods: users, Device: b.devices[deviceKey{result.Pool, result.Device}], Status: StatusOf(c, result)}
			if h.Device != nil {
				h.Device.Holdings = append(h.Device.Holdings, h)
			}
			b.model.Holdings = append(b.model.Holdings, h)
		}
	}
}

func (b *builder) sort() {
	slices.SortFunc(b.model.Nodes, func(x, y *Node) int { return cmp.Compare(x.Name, y.Name) })
	for _, n := range b.model.Nodes {
		slices.SortFunc(n.GPUs, func(x, y *GPU) int { return cmp.Or(cmp.Compare(x.PCIBusID, y.PCIBusID), cmp.Compare(x.Name, y.Name)) })
		for i, g := range n.GPUs {
			g.Index = i
		}
	}
}

// text returns an attribute of the driver's own domain, a text or a version.
func (b *builder) text(d *resourceapi.Device, name string) string {
	a, has := d.Attributes[resourceapi.QualifiedName(name)]
	if !has {
		a = d.Attributes[resourceapi.QualifiedName(b.model.Driver+"/"+name)]
	}
	return ptr.Deref(cmp.Or(a.StringValue, a.VersionValue), "")
}

// StatusOf returns what the driver says of a device that a claim has, or nil.
func StatusOf(c *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocatedDeviceStatus {
	for i := range c.Status.Devices {
		s := &c.Status.Devices[i]
		if s.Driver == r.Driver && s.Pool == r.Pool && s.Device == r.Device && ptr.Deref(s.ShareID, "") == string(ptr.Deref(r.ShareID, "")) {
			return s
		}
	}
	return nil
}

// RuleCovers reports whether a rule taints a device. One without a selector taints none, one with an
// empty selector taints all.
func RuleCovers(rule *resourceapi.DeviceTaintRule, driver, pool, device string) bool {
	s := rule.Spec.DeviceSelector
	return s != nil && (s.Driver == nil || *s.Driver == driver) &&
		(s.Pool == nil || *s.Pool == pool) && (s.Device == nil || *s.Device == device)
}
