// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
)

// wanted is what was wanted last, and of what it was made.
type wanted struct {
	rules.Want
	inventory *device.Inventory
	features  Features
}

// want has the slices that this cluster can take.
func (p *Publisher) want(ctx context.Context) *rules.Want {
	inventory := p.inventory.Load()
	if !p.features.begun || inventory == p.wanted.inventory && p.features.now == p.wanted.features {
		return &p.wanted.Want
	}
	slices := Resources(p.pool.driverName, p.pool.nodeName, inventory, p.features.now).Pools[p.pool.nodeName].Slices
	p.sayLacks(ctx, reasonLeftOut, p.features.leftOut(p.pool, inventory, slices))
	p.sayLacks(ctx, reasonSchedulerCrashes, p.features.crashes(slices))
	objects := p.pool.objects(slices)
	p.says.right = p.says.right && apiequality.Semantic.DeepEqual(objects, p.wanted.Slices)
	p.wanted = wanted{
		Want: rules.Want{
			Node: p.pool.nodeName, Slices: objects, NoTaints: !p.features.now.Taints, MaxTaints: p.features.now.maxTaints(),
		},
		inventory: inventory, features: p.features.now,
	}
	return &p.wanted.Want
}

// Resources are the slices of an inventory in a cluster with these features.
func Resources(driverName, nodeName string, inventory *device.Inventory, f Features) resourceslice.DriverResources {
	return inventory.DriverResources(device.Options{
		Driver:               driverName,
		Pool:                 nodeName,
		NodeName:             nodeName,
		PartitionableDevices: f.PartitionableDevices,
		ConsumableCapacity:   f.ConsumableCapacity,
		NoShareCounters:      !f.ShareCounters,
		NoEffectNone:         !f.TaintEffectNone,
		NoTaints:             !f.Taints,
		MaxTaints:            f.maxTaints(),
	})
}

// pool is the only pool of a node.
type pool struct{ driverName, nodeName string }

// objects gives slices their names.
func (p pool) objects(contents []resourceslice.Slice) []*resourceapi.ResourceSlice {
	objects := make([]*resourceapi.ResourceSlice, len(contents))
	for i, content := range contents {
		objects[i] = &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: p.sliceName(i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: p.driverName, NodeName: &p.nodeName, Devices: content.Devices, SharedCounters: content.SharedCounters,
			},
		}
	}
	return objects
}

// sliceName begins with the index, because the scheduler tries slices in the order
// of their names. It is the same for every instance, so that two of them cannot make
// one slice twice.
func (p pool) sliceName(index int) string {
	name := fmt.Sprintf("%05x-%s-%s", index, p.driverName, p.nodeName)
	if len(name) <= validation.DNS1123SubdomainMaxLength {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	prefix := strings.TrimRight(name[:validation.DNS1123SubdomainMaxLength-2*8-1], ".-")
	return prefix + "-" + hex.EncodeToString(sum[:8])
}

// selector selects the slices of this driver on this node.
func (p pool) selector() string {
	return fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.driverName,
		resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()
}
