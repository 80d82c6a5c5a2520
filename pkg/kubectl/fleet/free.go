// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// Room is what claims could still be allocated of a GPU, each kind by itself: what takes one
// may leave no room for another. It is what the scheduler's allocator would find, for claims
// that tolerate no taint.
type Room struct {
	// AtMost says that there may be less: of what takes some, not everything could be read.
	AtMost bool `json:"atMost,omitempty"`
	// Whole says that the undivided GPU can be allocated to one claim.
	Whole bool `json:"whole"`
	// Partitions are the profiles that fit, in the order in which they are published.
	Partitions []PartitionRoom `json:"partitions,omitempty"`
	// Shares are those of devices that claims can share.
	Shares []ShareRoom `json:"shares,omitempty"`
}

// Nothing reports whether nothing can be allocated.
func (r Room) Nothing() bool { return !r.Whole && len(r.Partitions) == 0 && len(r.Shares) == 0 }

// PartitionRoom says how many partitions of a profile fit.
type PartitionRoom struct {
	Profile string `json:"profile"`
	// Count is how many can be allocated at once, at least 1.
	Count int `json:"count"`
	// MemoryBytes is what each has.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// ShareRoom says what can be allocated of a shared device.
type ShareRoom struct {
	Device *Device `json:"-"`
	// Name, Type and Profile are those of the device.
	Name    string `json:"device"`
	Type    string `json:"type"`
	Profile string `json:"profile,omitempty"`
	// Count is how many claims without a request for capacity can be allocated at once. It may
	// be 0 where a claim that asks for less than others get by default still fits.
	Count int `json:"count"`
	// Shares is how many more claims can share the device at most.
	Shares int `json:"shares"`
	// MemoryBytes and SMPercent are the most that one claim can get. 0 is no promise: time
	// slices may have no limit.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	SMPercent   int64 `json:"smPercent,omitempty"`
}

// Free says what is free on a GPU.
func Free(g *GPU) Room { return g.room((*Device).Held) }

// Offered says what would be free if no claim had anything of the GPU.
func Offered(g *GPU) Room { return g.room(func(*Device) []*Holding { return nil }) }

// room says what is left beside what claims hold of each device.
func (g *GPU) room(heldOf func(*Device) []*Holding) Room {
	if g.Node.Incomplete {
		return Room{}
	}
	left, room := g.leftBeside(heldOf), Room{AtMost: g.Node.Hidden}
	partitions := map[string][]*Device{}
	var profiles []string
	for _, d := range g.Devices {
		if d.Tainted() {
			continue
		}
		switch held := heldOf(d); {
		case d.Shared():
			if len(held) > 0 || left.Fit(d.Published) {
				if r, some := roomFor(d, held); some {
					room.Shares = append(room.Shares, r)
				}
			}
		case len(held) > 0 || !left.Fit(d.Published) || d.Type == TypeObserver:
		case d.Profile == "":
			room.Whole = true
		default:
			if partitions[d.Profile] == nil {
				profiles = append(profiles, d.Profile)
			}
			partitions[d.Profile] = append(partitions[d.Profile], d)
		}
	}
	for _, p := range profiles {
		of := partitions[p]
		room.Partitions = append(room.Partitions, PartitionRoom{Profile: p, Count: left.most(of), MemoryBytes: of[0].Capacity(CapacityMemory)})
	}
	return room
}

// leftBeside is what the devices that are held leave of the counters. One that several claims share consumes its counters once.
func (g *GPU) leftBeside(heldOf func(*Device) []*Holding) Counters {
	left := g.all()
	for _, d := range g.Devices {
		if len(heldOf(d)) > 0 {
			left.Add(d.Published, -1)
		}
	}
	return left
}

// Counters are what devices draw from together: thousandths, by counter set and name.
type Counters map[string]map[string]int64

// CountersOf returns those of slices while nobody has a device.
func CountersOf(all []*resourceapi.ResourceSlice) Counters {
	c := Counters{}
	for _, s := range all {
		for _, set := range s.Spec.SharedCounters {
			c[set.Name] = map[string]int64{}
			for name, counter := range set.Counters {
				c[set.Name][name] = counter.Value.MilliValue()
			}
		}
	}
	return c
}

// Add takes what a device consumes from the counters with the sign -1, and gives it back with 1.
func (c Counters) Add(d *resourceapi.Device, sign int64) {
	for _, use := range d.ConsumesCounters {
		for name, counter := range use.Counters {
			if left := c[use.CounterSet]; left != nil {
				left[name] += sign * counter.Value.MilliValue()
			}
		}
	}
}

// Fit reports whether there is as much as a device consumes.
func (c Counters) Fit(d *resourceapi.Device) bool {
	for _, use := range d.ConsumesCounters {
		for name, counter := range use.Counters {
			if c[use.CounterSet][name] < counter.Value.MilliValue() {
				return false
			}
		}
	}
	return true
}

// all returns a copy of the counters of the GPU.
func (g *GPU) all() Counters { return Counters{g.Name: maps.Clone(g.counters)} }

// Most returns how many of a GPU's devices could be allocated together if nothing else of the
// GPU was, such as seven partitions 1g.10gb of an H100.
func (g *GPU) Most(devices []*Device) int { return g.all().most(devices) }

// most returns how many of the devices fit together. It tries all choices, as the allocator
// does: a GPU has few devices of a profile.
func (c Counters) most(devices []*Device) int {
	best := 0
	for i, d := range devices {
		if len(devices)-i <= best {
			break
		}
		if !c.Fit(d.Published) {
			continue
		}
		c.Add(d.Published, -1)
		best = max(best, 1+c.most(devices[i+1:]))
		c.Add(d.Published, 1)
	}
	return best
}

// roomFor returns what is left of a shared device whose counters fit.
func roomFor(d *Device, held []*Holding) (ShareRoom, bool) {
	consumed := map[resourceapi.QualifiedName]int64{}
	for _, h := range held {
		for name, amount := range h.Result.ConsumedCapacity {
			consumed[name] += amount.Value()
		}
	}
	room := ShareRoom{Device: d, Name: d.Name, Type: d.Type, Profile: d.Profile, Count: -1}
	for name, capacity := range d.Published.Capacity {
		left := capacity.Value.Value() - consumed[name]
		least, byDefault := bounds(capacity)
		if left < least {
			return ShareRoom{}, false
		}
		if byDefault > 0 && (room.Count < 0 || int(left/byDefault) < room.Count) {
			room.Count = int(left / byDefault)
		}
		most := Largest(capacity, *resource.NewQuantity(left, capacity.Value.Format))
		switch name {
		case CapacityShares:
			room.Shares = int(left / max(1, least))
		case CapacityMemory:
			room.MemoryBytes = most.Value()
		case CapacitySMPercent:
			room.SMPercent = most.Value()
		}
	}
	room.Count = max(0, room.Count)
	return room, true
}

// bounds returns the least that a claim can consume of a capacity, and what one without a
// request consumes. Without a policy that is all of it.
func bounds(c resourceapi.DeviceCapacity) (least, byDefault int64) {
	amount, _ := Granted(nil, &c)
	least, byDefault = amount.Value(), amount.Value()
	switch p := ptr.Deref(c.RequestPolicy, resourceapi.CapacityRequestPolicy{}); {
	case p.ValidRange != nil && p.ValidRange.Min != nil:
		least = min(least, p.ValidRange.Min.Value())
	case len(p.ValidValues) > 0:
		least = min(least, p.ValidValues[0].Value())
	}
	return least, byDefault
}

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
		consumed := h.Result.ConsumedCapacity[name]
		most = max(most, Ratio(consumed.Value(), h.Device.Capacity(name)))
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
