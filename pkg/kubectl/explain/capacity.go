// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"

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
		amount, problem := consumption(asked, &c)
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

// consumption returns what a claim gets that asks for an amount, or for nothing: the next larger
// amount that the device allows. It says which limit the amount is beyond.
func consumption(asked *resource.Quantity, c *resourceapi.DeviceCapacity) (resource.Quantity, string) {
	policy := c.RequestPolicy
	switch {
	case asked == nil && policy != nil && policy.Default != nil:
		return policy.Default.DeepCopy(), ""
	case asked == nil:
		return c.Value.DeepCopy(), ""
	case policy == nil:
		return asked.DeepCopy(), ""
	case policy.ValidRange != nil:
		return inRange(asked, policy.ValidRange)
	case len(policy.ValidValues) > 0:
		i := slices.IndexFunc(policy.ValidValues, func(v resource.Quantity) bool { return asked.Cmp(v) <= 0 })
		if i < 0 {
			largest := policy.ValidValues[len(policy.ValidValues)-1]
			return asked.DeepCopy(), fmt.Sprintf("the largest amount of a share is %s", largest.String())
		}
		return policy.ValidValues[i].DeepCopy(), ""
	}
	return asked.DeepCopy(), ""
}

func inRange(asked *resource.Quantity, r *resourceapi.CapacityRequestPolicyRange) (resource.Quantity, string) {
	amount := asked.DeepCopy()
	if r.Min != nil && amount.Cmp(*r.Min) < 0 {
		amount = r.Min.DeepCopy()
	}
	if r.Min != nil && r.Step != nil && r.Step.Value() > 0 {
		if over := (amount.Value() - r.Min.Value()) % r.Step.Value(); over != 0 {
			amount.Set(amount.Value() - over + r.Step.Value())
		}
	}
	if r.Max != nil && amount.Cmp(*r.Max) > 0 {
		text := fmt.Sprintf("a share has at most %s", r.Max.String())
		if r.Step != nil && asked.Cmp(*r.Max) <= 0 {
			text = fmt.Sprintf("shares come in steps of %s, and have at most %s", r.Step.String(), r.Max.String())
		}
		return amount, text
	}
	return amount, ""
}

func sortedNames[V any](m map[resourceapi.QualifiedName]V) []resourceapi.QualifiedName {
	return sets.List(sets.KeySet(m))
}
