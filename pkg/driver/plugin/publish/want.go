// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
)

// wanted is what was wanted last, and of what it was made.
type wanted struct {
	rules.Want
	inventory *device.Inventory
	features  Features
}

// want has the slices that this cluster can take.
func (p *Publisher) want(ctx context.Context) *rules.Want {
	inventory, now := p.inventory.Load(), p.features.now
	if p.features.known && (inventory != p.wanted.inventory || now != p.wanted.features) {
		slices := p.pool.objects(inventory, now)
		p.Say(ctx, reasonLeftOut, p.features.leftOut(now != AllFeatures && countDevices(slices) < countDevices(p.pool.objects(inventory, AllFeatures))))
		p.Say(ctx, reasonSchedulerCrashes, p.features.crashes(usedBy(slices...).has(PartitionableDevices)))
		p.wanted = wanted{
			Want:      rules.Want{Node: p.pool.nodeName, Slices: slices, NoTaints: !now.has(Taints), MaxTaints: now.maxTaints()},
			inventory: inventory, features: now,
		}
	}
	p.wanted.Owner, _ = p.owner.Load().(types.UID)
	return &p.wanted.Want
}

// Resources are the slices of an inventory in a cluster with these features.
func Resources(driverName, nodeName string, inventory *device.Inventory, f Features) resourceslice.DriverResources {
	return inventory.DriverResources(device.Options{
		Driver:               driverName,
		Pool:                 nodeName,
		NodeName:             nodeName,
		PartitionableDevices: f.has(PartitionableDevices),
		ConsumableCapacity:   f.has(ConsumableCapacity),
		NoShareCounters:      !f.has(ShareCounters),
		NoEffectNone:         !f.has(NewTaints),
		NoTaints:             !f.has(Taints),
		MaxTaints:            f.maxTaints(),
	})
}

// pool is the only pool of a node.
type pool struct{ driverName, nodeName string }

// objects are the slices of an inventory, with their names.
func (p pool) objects(inventory *device.Inventory, f Features) (objects []*resourceapi.ResourceSlice) {
	for i, content := range Resources(p.driverName, p.nodeName, inventory, f).Pools[p.nodeName].Slices {
		objects = append(objects, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: p.sliceName(i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: p.driverName, NodeName: &p.nodeName, Devices: content.Devices, SharedCounters: content.SharedCounters,
			},
		})
	}
	return objects
}

func countDevices(slices []*resourceapi.ResourceSlice) (devices int) {
	for _, slice := range slices {
		devices += len(slice.Spec.Devices)
	}
	return devices
}

// sliceName begins with the index, because the scheduler tries slices in the order
// of their names. It is the same for every instance, so that two of them cannot make
// one slice twice.
func (p pool) sliceName(index int) string {
	return fmt.Sprintf("%05x-%s-%s", index, p.driverName, p.nodeName)
}

// selector selects the slices of this driver on this node.
func (p pool) selector() string {
	return fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.driverName,
		resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()
}
