// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
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
