// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
)

type capacities map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// capacitiesOf returns the same names for all devices of a kind; 0 means not known, or none. All kinds
// have memory and multiprocessors.
func capacitiesOf(d Device) capacities {
	r := d.GPU.Resources
	if d.Partition != nil {
		r = d.Partition.Profile.Resources
	}
	if d.Kind == Observer {
		r = gpu.Resources{} // it has nothing for a claim to use
	}
	c := capacities{}
	if d.Share != nil {
		c["multiprocessors"] = onDemand(count(r.Multiprocessors))
		c.share(d.Share)
		return c
	}
	c["multiprocessors"] = resourceapi.DeviceCapacity{Value: count(r.Multiprocessors)}
	c["memory"] = resourceapi.DeviceCapacity{Value: quantity(int64(r.MemoryBytes), resource.BinarySI)}
	if d.Kind == Whole {
		// A request for it means a part of a GPU's multiprocessors: a partition must not satisfy it
		// with 100 of its own.
		c["smPercent"] = resourceapi.DeviceCapacity{Value: quantity(100, resource.DecimalSI)}
	}
	if d.Kind != Observer {
		c.engines(r)
	}
	return c
}

// engines adds what exclusive devices have. Claims with a share divide no engines among them, and
// whatever a share has is written into the allocation of each.
func (c capacities) engines(r gpu.Resources) {
	for name, engines := range map[resourceapi.QualifiedName]int{
		"copyEngines": r.CopyEngines,
		"decoders":    r.Decoders,
		"encoders":    r.Encoders,
		"jpegEngines": r.JPEGEngines,
		"ofaEngines":  r.OFAEngines,
	} {
		c[name] = resourceapi.DeviceCapacity{Value: count(engines)}
	}
}

// share adds the capacities of which each claim consumes a part, requested or not.
func (c capacities) share(s *Share) {
	c["shares"] = portions{
		total: int64(s.Clients), fallback: 1, least: 1, most: int64(s.Clients), step: 1, format: resource.DecimalSI,
	}.capacity()
	// Where there is no limit, nothing is counted for a claim without a request.
	c["memory"] = portions{
		total: s.MemoryBytes, fallback: s.DefaultMemoryBytes, least: min(mib, s.DefaultMemoryBytes), most: s.MaxMemoryBytes,
		step: mib, format: resource.BinarySI,
	}.capacity()
	c["smPercent"] = portions{
		total: int64(s.Percent), fallback: int64(s.DefaultPercent), least: int64(min(1, s.DefaultPercent)), most: int64(min(100, s.Percent)),
		step: 1, format: resource.DecimalSI,
	}.capacity()
}

// portions describes a capacity that claims divide among them.
type portions struct {
	total int64
	// fallback is for a claim without a request. Requests get from least to most in
	// steps, rounded up.
	fallback, least, most, step int64
	format                      resource.Format
}

func (p portions) capacity() resourceapi.DeviceCapacity {
	portion := func(n int64) *resource.Quantity { return new(quantity(n, p.format)) }
	c := resourceapi.DeviceCapacity{
		Value: *portion(p.total),
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default:    portion(p.fallback),
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: portion(p.least), Max: portion(p.most)},
		},
	}
	// The API requires room for one step. Without it there is only one value.
	if p.least+p.step <= p.total {
		c.RequestPolicy.ValidRange.Step = portion(p.step)
	}
	return c
}

// onDemand makes a capacity of which a claim without a request consumes nothing. By
// default it would consume all of it.
func onDemand(total resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{
		Value: total,
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default:    new(quantity(0, resource.DecimalSI)),
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: new(quantity(0, resource.DecimalSI))},
		},
	}
}

// count is how many there are of something, 0 where that is not known.
func count(n int) resource.Quantity { return quantity(int64(max(0, n)), resource.DecimalSI) }

func quantity(n int64, format resource.Format) resource.Quantity {
	return *resource.NewQuantity(n, format)
}
