// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
)

type capacities map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// maxCapacities is the same limit for the capacities of exclusive devices, which are
// nearly all: the ninth costs 0.7 KB.
const maxCapacities = 8

// capacitiesOf returns the same names for all devices, except that only shares have
// "shares"; 0 means not known, or none.
func capacitiesOf(d Device) capacities {
	r := d.GPU.Resources
	if d.Partition != nil {
		r = d.Partition.Profile.Resources
	}
	percent := int64(100)
	if d.Kind == Observer {
		// It has nothing for a claim to use.
		r, percent = gpu.Resources{}, 0
	}
	c := capacities{}
	for name, value := range map[resourceapi.QualifiedName]int{
		"multiprocessors": r.Multiprocessors,
		"copyEngines":     r.CopyEngines,
		"decoders":        r.Decoders,
		"encoders":        r.Encoders,
		"jpegEngines":     r.JPEGEngines,
		"ofaEngines":      r.OFAEngines,
	} {
		known := quantity(int64(max(0, value)), resource.DecimalSI)
		if c[name] = (resourceapi.DeviceCapacity{Value: known}); !d.Exclusive() {
			c[name] = onDemand(known)
		}
	}
	if d.Exclusive() {
		c["memory"] = resourceapi.DeviceCapacity{Value: quantity(int64(r.MemoryBytes), resource.BinarySI)}
		c["smPercent"] = resourceapi.DeviceCapacity{Value: quantity(percent, resource.DecimalSI)}
		return c
	}
	c.share(d.Share)
	return c
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

func quantity(n int64, format resource.Format) resource.Quantity {
	return *resource.NewQuantity(n, format)
}
