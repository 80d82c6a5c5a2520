// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

func sameAs(attribute string) []resourceapi.DeviceConstraint {
	return []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(attribute))}}
}

func named(name string, r resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	r.Name = name
	return r
}

// halfOfEveryPair gives each node four GPUs that NVLink joins in pairs, and takes two on each, of different pairs.
func halfOfEveryPair(f *fleettest.Fleet) {
	f.Nodes, f.Slices = nil, nil
	for _, node := range []string{"n1", "n2"} {
		f.AddPairs(node, "h100-nvl", 4)
		one, other := fleettest.GPUOf(node, 0), fleettest.GPUOf(node, 3)
		for name, uuid := range map[string]string{node + "-a": one, node + "-b": other} {
			f.Held("other", name, node, fleettest.Request(whole, "device.attributes['gpu.nvidia.com'].uuid == '"+uuid+"'"))
		}
	}
}

// TestAttributeText: every kind of value can be read.
func TestAttributeText(t *testing.T) {
	for want, a := range map[string]resourceapi.DeviceAttribute{
		`"x"`:   {StringValue: new("x")},
		"1.2.3": {VersionValue: new("1.2.3")},
		"4":     {IntValue: new(int64(4))},
		"true":  {BoolValue: new(true)},
	} {
		if got := attributeText(a); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestValuesText(t *testing.T) {
	for want, values := range map[string]map[string]int{
		"none":               nil,
		"2 with a":           {"a": 2},
		"2 with b, 1 with a": {"a": 1, "b": 2},
		"1 with a, 1 with b, 1 with c, 1 with d, others with 2 more values": {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1},
	} {
		if got := valuesText(values); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
