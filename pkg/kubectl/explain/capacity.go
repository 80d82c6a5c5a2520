// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// capacity adds why a device has not enough of what a request asks for. What it never has comes before what it has no more.
func (j *judge) capacity(f *finding, a ask) {
	wanted := map[resourceapi.QualifiedName]resource.Quantity{}
	if *a.Capacity != nil {
		wanted = (*a.Capacity).Requests
	}
	for _, name := range sortedNames(wanted) {
		if _, has := f.device.Capacity[name]; !has {
			f.add(CapacityUnknown, "%s", name)
			return
		}
	}
	amounts := map[resourceapi.QualifiedName]resource.Quantity{}
	for _, name := range sortedNames(f.device.Capacity) {
		c := f.device.Capacity[name]
		var asked *resource.Quantity
		if q, has := wanted[name]; has {
			asked = &q
		}
		amount, problem := fleet.Granted(asked, &c)
		if problem == "" && amount.Cmp(c.Value) > 0 {
			problem = "no device has more than " + amountText(name, c.Value)
		}
		if problem != "" {
			f.most = c.Value
			f.add(CapacityTooLarge, "%s %s is too much: %s", name, asked.String(), problem)
			return
		}
		amounts[name] = amount
	}
	// What a device that is not shared offers is there or not.
	if !ptr.Deref(f.device.AllowMultipleAllocations, false) {
		return
	}
	for _, name := range sortedNames(amounts) {
		if left := j.left(f, name); left.Cmp(amounts[name]) < 0 {
			f.add(CapacityUsed, "%s", name)
		}
	}
}

// amountText writes memory as people say it.
func amountText(name resourceapi.QualifiedName, q resource.Quantity) string {
	if unqualified(string(name)) == fleet.CapacityMemory {
		return printer.Bytes(q.Value())
	}
	return q.String()
}

// left returns how much of a capacity nobody has.
func (j *judge) left(f *finding, name resourceapi.QualifiedName) resource.Quantity {
	left := f.device.Capacity[name].Value.DeepCopy()
	for _, share := range j.planner.Shares(f.pool.Driver, f.pool.Name, f.device.Name) {
		left.Sub(share.ConsumedCapacity[name])
	}
	return left
}

func sortedNames[V any](m map[resourceapi.QualifiedName]V) []resourceapi.QualifiedName {
	return sets.List(sets.KeySet(m))
}
