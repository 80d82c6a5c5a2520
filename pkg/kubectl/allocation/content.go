// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"encoding/json"
	"hash/maphash"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// seed of all hashes. They live as long as the process.
var seed = maphash.MakeSeed()

// deviceContent stands for what a device has, apart from its name, the names of its counter sets
// and the values of its attributes: these differ between nodes that are otherwise alike.
type deviceContent uint64

// entry is one thing that a device has. Hashes of entries are added up, because maps have no
// order.
type entry struct {
	kind, name, text string
	number           int64
}

func (e entry) hash() uint64 { return maphash.Comparable(seed, e) }

// amount is an entry for a quantity. Most are whole numbers.
func amount(kind, name string, q *resource.Quantity) uint64 {
	if q == nil {
		return 0
	}
	if n, whole := q.AsInt64(); whole {
		return entry{kind: kind, name: name, number: n}.hash()
	}
	return entry{kind: kind, name: name, text: q.String()}.hash()
}

func contentsOf(s *resourceapi.ResourceSlice) []deviceContent {
	out := make([]deviceContent, 0, len(s.Spec.Devices))
	for i := range s.Spec.Devices {
		out = append(out, contentOf(&s.Spec.Devices[i]))
	}
	return out
}

func contentOf(d *resourceapi.Device) deviceContent {
	var sum uint64
	if ptr.Deref(d.AllowMultipleAllocations, false) {
		sum += entry{kind: "allowMultipleAllocations"}.hash()
	}
	for name := range d.Attributes {
		sum += entry{kind: "attribute", name: string(name)}.hash()
	}
	for name, c := range d.Capacity {
		sum += amount("capacity", string(name), &c.Value)
		sum += policyContent(string(name), c.RequestPolicy)
	}
	for i, c := range d.ConsumesCounters {
		for name, counter := range c.Counters {
			sum += amount("counter", name, &counter.Value) * uint64(i+1)
		}
		for _, group := range c.CompatibilityGroups {
			sum += entry{kind: "group", name: group, number: int64(i)}.hash()
		}
	}
	for _, t := range d.Taints {
		sum += entry{kind: "taint", name: t.Key, text: t.Value + "\x00" + string(t.Effect)}.hash()
	}
	return deviceContent(sum + rareContent(d))
}

func policyContent(name string, p *resourceapi.CapacityRequestPolicy) uint64 {
	if p == nil {
		return 0
	}
	sum := amount("default", name, p.Default)
	if r := p.ValidRange; r != nil {
		sum += amount("min", name, r.Min) + amount("max", name, r.Max) + amount("step", name, r.Step)
	}
	for i := range p.ValidValues {
		sum += amount("valid", name, &p.ValidValues[i])
	}
	return sum
}

// rareContent is that of fields that hardly any device has.
func rareContent(d *resourceapi.Device) uint64 {
	rest := *d
	rest.Name, rest.Attributes, rest.Capacity, rest.ConsumesCounters, rest.Taints = "", nil, nil, nil, nil
	if rest.NodeName == nil && rest.NodeSelector == nil && rest.AllNodes == nil && rest.BindsToNode == nil &&
		rest.BindingConditions == nil && rest.BindingFailureConditions == nil && rest.NodeAllocatableResources == nil {
		return 0
	}
	// All of its types can be encoded.
	text, err := json.Marshal(rest)
	if err != nil {
		text = []byte(err.Error())
	}
	return entry{kind: "rest", text: string(text)}.hash()
}

// valueHash is that of an attribute's value.
func valueHash(name string, a *resourceapi.DeviceAttribute) uint64 {
	switch {
	case a.StringValue != nil:
		return entry{kind: "string", name: name, text: *a.StringValue}.hash()
	case a.VersionValue != nil:
		return entry{kind: "version", name: name, text: *a.VersionValue}.hash()
	case a.IntValue != nil:
		return entry{kind: "int", name: name, number: *a.IntValue}.hash()
	case a.BoolValue != nil && *a.BoolValue:
		return entry{kind: "true", name: name}.hash()
	case a.BoolValue != nil:
		return entry{kind: "false", name: name}.hash()
	}
	text, err := json.Marshal(a)
	if err != nil {
		text = []byte(err.Error())
	}
	return entry{kind: "list", name: name, text: string(text)}.hash()
}
