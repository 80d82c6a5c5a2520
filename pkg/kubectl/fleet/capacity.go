// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// Granted returns what a claim gets that asks for an amount, or for nothing: the next larger
// amount that the device allows. It says which limit the amount is beyond.
func Granted(asked *resource.Quantity, c *resourceapi.DeviceCapacity) (resource.Quantity, string) {
	p := ptr.Deref(c.RequestPolicy, resourceapi.CapacityRequestPolicy{})
	switch {
	case asked == nil && p.Default != nil:
		return p.Default.DeepCopy(), ""
	case asked == nil:
		return c.Value.DeepCopy(), ""
	case p.ValidRange != nil:
		return inRange(asked, p.ValidRange)
	}
	for i, v := range p.ValidValues {
		if asked.Cmp(v) <= 0 {
			return v.DeepCopy(), ""
		} else if i == len(p.ValidValues)-1 {
			return asked.DeepCopy(), fmt.Sprintf("the largest amount of a share is %s", v.String())
		}
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

// Largest returns the largest amount of a capacity that a claim can ask for and get of what is
// left: requests are rounded up to what the policy allows.
func Largest(c resourceapi.DeviceCapacity, left resource.Quantity) resource.Quantity {
	p := ptr.Deref(c.RequestPolicy, resourceapi.CapacityRequestPolicy{})
	if r := p.ValidRange; r != nil {
		least := ptr.Deref(r.Min, resource.Quantity{})
		if r.Max != nil && left.Cmp(*r.Max) > 0 {
			left = r.Max.DeepCopy()
		}
		if left.Cmp(least) < 0 {
			return resource.Quantity{}
		}
		if r.Step != nil && r.Step.Value() > 0 {
			return *resource.NewQuantity(left.Value()-(left.Value()-least.Value())%r.Step.Value(), r.Step.Format)
		}
	} else if len(p.ValidValues) > 0 {
		// They are in ascending order.
		for _, q := range slices.Backward(p.ValidValues) {
			if q.Cmp(left) <= 0 {
				return q
			}
		}
		return resource.Quantity{}
	}
	return left
}

// capacityMultiprocessors is the one with which parts of GPUs are compared, beside the memory.
const capacityMultiprocessors = "multiprocessors"

// Part returns which part of its GPU a claim keeps from others, from 0 to 1: of memory or of
// multiprocessors, whichever is more; of shares the part that the scheduler counts. It is 0 where
// the device is not published any more, and for admin access.
func (h *Holding) Part() float64 {
	if h.Device == nil || h.Admin() {
		return 0
	}
	if !h.Device.Shared() {
		return h.Device.Part()
	}
	most := 0.0
	for _, name := range []resourceapi.QualifiedName{CapacityShares, CapacityMemory, CapacitySMPercent} {
		consumed, total := h.Result.ConsumedCapacity[name], h.Device.Published.Capacity[name]
		most = max(most, Ratio(consumed.Value(), total.Value.Value()))
	}
	return h.Device.Part() * min(1, most)
}

// Part returns which part of its GPU the device is, from 0 to 1: of memory or of
// multiprocessors, whichever is more. That of shares is the part that they divide.
func (d *Device) Part() float64 {
	if d.Profile == "" {
		return 1
	}
	all := int64(0)
	for _, other := range d.GPU.Devices {
		all = max(all, other.Capacity(capacityMultiprocessors))
	}
	memory := d.Capacity(CapacityMemory)
	if d.Shared() {
		// What shares are promised may be more than there is.
		memory = 0
	}
	return min(1, max(Ratio(memory, d.GPU.MemoryBytes), Ratio(d.Capacity(capacityMultiprocessors), all)))
}

// Capacity returns how much a device has of a capacity, all shares together, 0 for none.
func (d *Device) Capacity(name resourceapi.QualifiedName) int64 {
	c := d.Published.Capacity[name]
	return c.Value.Value()
}

// Ratio is the part that some is of all, 0 of nothing.
func Ratio(part, all int64) float64 {
	if all <= 0 {
		return 0
	}
	return float64(part) / float64(all)
}
