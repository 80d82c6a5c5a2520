// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// Options say how an inventory is published.
type Options struct {
	// Driver is the driver's name, which is also the domain of its attributes.
	Driver string
	// Pool is the name of the one pool that holds everything; by convention
	// the node's name.
	Pool string
	// NodeName is the node that the devices are on.
	NodeName string
	// PartitionableDevices is false for clusters that drop counters (Kubernetes
	// 1.34 and 1.35 by default). Without counters the devices of claims could
	// overlap, so that only whole GPUs are published.
	PartitionableDevices bool
	// ConsumableCapacity is false for clusters that drop what shares need
	// (Kubernetes 1.34 and 1.35 by default). Then no shares are published: the
	// scheduler would give all of one to a single claim.
	ConsumableCapacity bool
	// NoShareCounters is true for clusters whose scheduler forgets the counters that
	// shares have consumed (Kubernetes 1.35, 1.36.0 and 1.36.1). Then a GPU has shares
	// only if it has no other device.
	NoShareCounters bool
	// NoEffectNone is true for API servers that refuse taints which only tell something
	// (Kubernetes 1.34). They are left out.
	NoEffectNone bool
	// NoTaints is true for API servers that drop taints (Kubernetes 1.34 and 1.35 by default). Then
	// nothing is published for observation only: without its taint claims for any device would get it.
	NoTaints bool
	// MaxTaints is how many taints of a device the API server takes, 0 if as many as this version.
	MaxTaints int
}

// DriverResources returns what the kubelet plugin helper publishes. The helper
// names the slices, in this order, and counts the pool's generation.
func (i *Inventory) DriverResources(o Options) resourceslice.DriverResources {
	return resourceslice.DriverResources{
		Pools: map[string]resourceslice.Pool{o.Pool: {Slices: i.slices(o)}},
	}
}

// ResourceSlices returns the same content as complete objects, as they would be
// after the first publication, for printing. Only the names differ from those
// that the helper generates; they sort the same way.
func (i *Inventory) ResourceSlices(o Options) []resourceapi.ResourceSlice {
	published := i.slices(o)
	objects := make([]resourceapi.ResourceSlice, len(published))
	for n, s := range published {
		nodeName := o.NodeName
		objects[n] = resourceapi.ResourceSlice{
			TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%03d", o.NodeName, o.Driver, n)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver:         o.Driver,
				Pool:           resourceapi.ResourcePool{Name: o.Pool, Generation: 1, ResourceSliceCount: int64(len(published))},
				NodeName:       &nodeName,
				Devices:        s.Devices,
				SharedCounters: s.SharedCounters,
			},
		}
	}
	return objects
}

// slices defines the layout of the pool, in this one place: counter sets in slices
// of their own, then one slice for each GPU, so that a change of one GPU changes
// one slice and leaves the pool complete. After a change of the policy there may be
// further slices for a while, at the end, so that the others stay where they are. A node
// that has nothing to offer has no slice: nobody asks whether a driver runs there, and
// every process that caches ResourceSlices would hold one for each node without a GPU.
func (i *Inventory) slices(o Options) []resourceslice.Slice {
	var sets []resourceapi.CounterSet
	var gpus, further []resourceslice.Slice
	for _, b := range i.boards {
		devices, overflow, counted := b.published(o)
		if len(devices) > 0 {
			gpus = append(gpus, resourceslice.Slice{Devices: devices})
		}
		for chunk := range slices.Chunk(overflow, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures) {
			further = append(further, resourceslice.Slice{Devices: chunk})
		}
		if counted {
			sets = append(sets, resourceapi.CounterSet{Name: b.counters.set, Counters: b.counters.all()})
		}
	}
	var all []resourceslice.Slice
	for chunk := range slices.Chunk(sets, resourceapi.ResourceSliceMaxCounterSets) {
		all = append(all, resourceslice.Slice{SharedCounters: chunk})
	}
	all = append(all, gpus...)
	all = append(all, further...)
	return all
}

// published returns the devices of a GPU for its own slice, those for further slices, and
// whether they draw on counters.
func (b board) published(o Options) (devices, overflow []resourceapi.Device, counted bool) {
	own := slices.DeleteFunc(b.all(), func(d Device) bool { return !o.supports(d) })
	if len(own) == 0 {
		return nil, nil, false
	}
	if o.NoShareCounters {
		own = withoutShareCounters(own)
	}
	// A GPU that is a single device in any case needs no counters to exclude anything. It
	// has them for quota, but not where a scheduler gets counters wrong.
	alone := o.NoShareCounters && len(own) == 1 && (len(b.counters.memorySlices) == 0 || !own[0].Exclusive())
	counted = o.PartitionableDevices && !alone
	for _, d := range own {
		if b.overflow[d.Name] {
			overflow = append(overflow, b.apiDevice(d, o, counted))
			continue
		}
		devices = append(devices, b.apiDevice(d, o, counted))
	}
	if o.PartitionableDevices && !o.NoTaints {
		// Admin access needs no observer where nothing is counted.
		devices = append(devices, b.apiDevice(b.observer(), o, false))
	}
	return devices, overflow, counted
}

// supports reports whether a cluster can handle a device. Without counters a share
// could be allocated together with the whole GPU.
func (o Options) supports(d Device) bool {
	return o.PartitionableDevices && (d.Exclusive() || o.ConsumableCapacity) || d.Kind == Whole
}

// withoutShareCounters leaves devices of a GPU that are counted correctly: those for
// one claim each, or else one for several claims, which needs no counters.
func withoutShareCounters(devices []Device) []Device {
	if exclusive := slices.DeleteFunc(slices.Clone(devices), func(d Device) bool { return !d.Exclusive() }); len(exclusive) > 0 {
		return exclusive
	}
	return devices[:1]
}

// apiDevice makes the device of the API. Taints depend only on the device's own
// GPU, so that a change of a GPU's status changes its slice only.
func (b board) apiDevice(d Device, o Options, counted bool) resourceapi.Device {
	device := resourceapi.Device{
		Name:       d.Name,
		Attributes: b.attributesOf(d),
		Capacity:   capacitiesOf(d),
		Taints:     o.taints(b.taints[d.Name]),
	}
	if d.Kind == Observer {
		device.Taints = o.taints([]taint{keepsAway(AdminAccess)})
	}
	if !d.Exclusive() {
		device.AllowMultipleAllocations = new(true)
	}
	if !counted {
		return device
	}
	device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: b.counters.set, Counters: b.counters.consumed(d.Partition)}}
	return device
}
