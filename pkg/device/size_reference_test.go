// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
)

// mostJSON is how large the slices of a DGX H100 may be.
const mostJSON = 160_000

// TestSizeOfReferenceDriver compares with what NVIDIA's DRA driver (v0.5, feature gate
// DynamicMIG) publishes for the same node. What Partage publishes by default is
// smaller, although it has shares in addition.
func TestSizeOfReferenceDriver(t *testing.T) {
	node := replicate(loadNode(t, "h100-80-sxm"), 8)
	reference := sizeOf(t, referenceSlices(node))
	if want := 8 * (1 + 25); reference.devices != want || reference.slices != 9 {
		t.Fatalf("%d devices in %d slices, want %d in 9", reference.devices, reference.slices, want)
	}
	for _, p := range sizedPolicies {
		own := sizeOf(t, inventoryOf(t, node, p.terms).ResourceSlices(sizeOptions))
		percent := func(own, reference int) string {
			return fmt.Sprintf("%d of %d (%d %%)", own, reference, 100*own/reference)
		}
		t.Logf("%s: protobuf %s, JSON %s, decoded %s", p.name,
			percent(own.stored, reference.stored), percent(own.sent, reference.sent), percent(own.decoded, reference.decoded))
		// With variants there are as many partitions as the reference driver has, and shares
		// and observers besides.
		if p.name != "default + variants" && own.stored >= reference.stored {
			t.Errorf("%s: larger than the reference driver's", p.name)
		}
		// What a new attribute costs is bytes in every API server: something else has to go.
		if p.name == "default" && own.sent > mostJSON {
			t.Errorf("%d bytes of JSON", own.sent)
		}
	}
}

// referenceSlices has the names, attributes, capacities and counters of the reference
// driver: one slice with all counter sets, and one for each GPU.
func referenceSlices(node *gpu.Node) []resourceapi.ResourceSlice {
	var sets []resourceapi.CounterSet
	slices := []resourceapi.ResourceSlice{{}} // the first is for the counter sets
	for n := range node.GPUs {
		g := &node.GPUs[n]
		all := map[string]int64{}
		var partitions []resourceapi.Device
		for _, p := range g.MIG.Profiles {
			engines := referenceEngines(p)
			for name, value := range engines {
				all[name] = max(all[name], value)
			}
			for _, at := range p.Placements {
				name := fmt.Sprintf("gpu-%d-mig-%s-%d-%d", g.Minor, strings.NewReplacer(".", "", "+", "-").Replace(p.Name), p.ID, at.Start)
				partitions = append(partitions, referenceDevice(node, g, name, p.Name, engines, at))
			}
		}
		everything := gpu.Placement{Size: g.MIG.MemorySlices}
		name := fmt.Sprintf("gpu-%d", g.Minor)
		slices = append(slices, resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
			Devices: append(partitions, referenceDevice(node, g, name, "", all, everything)),
		}})
		sets = append(sets, resourceapi.CounterSet{Name: name + "-counter-set", Counters: referenceCounters(all, everything)})
	}
	slices[0].Spec.SharedCounters = sets
	for n := range slices {
		spec := &slices[n].Spec
		spec.Driver, spec.NodeName = sizeOptions.Driver, &sizeOptions.NodeName
		spec.Pool = resourceapi.ResourcePool{Name: sizeOptions.Pool, Generation: 1, ResourceSliceCount: int64(len(slices))}
	}
	return slices
}

// referenceEngines are capacities, and the counters that partitions draw of each.
func referenceEngines(p gpu.Profile) map[string]int64 {
	r := p.Resources
	return map[string]int64{
		"memory": int64(r.MemoryBytes), "multiprocessors": int64(r.Multiprocessors), "copyEngines": int64(r.CopyEngines), // #nosec G115
		"decoders": int64(r.Decoders), "encoders": int64(r.Encoders), "jpegEngines": int64(r.JPEGEngines), "ofaEngines": int64(r.OFAEngines),
	}
}

func referenceDevice(node *gpu.Node, g *gpu.GPU, name, profile string, engines map[string]int64, at gpu.Placement) resourceapi.Device {
	d := Device{GPU: g, Kind: Whole}
	attributes := attributesOf(node, d)
	delete(attributes, "isolation")
	delete(attributes, "profile")
	delete(attributes, "parentUUID")
	attributes.text("brand", "Nvidia")
	if profile != "" {
		delete(attributes, "uuid")
		attributes.text("type", "mig")
		attributes.text("parentUUID", g.UUID)
		attributes.text("profile", profile)
	}
	capacity := capacities{}
	for name, value := range engines {
		capacity[resourceapi.QualifiedName(name)] = resourceapi.DeviceCapacity{Value: quantity(value, resource.BinarySI)}
	}
	return resourceapi.Device{
		Name: name, Attributes: attributes, Capacity: capacity,
		ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
			CounterSet: fmt.Sprintf("gpu-%d-counter-set", g.Minor), Counters: referenceCounters(engines, at),
		}},
	}
}

func referenceCounters(engines map[string]int64, at gpu.Placement) map[string]resourceapi.Counter {
	counters := map[string]resourceapi.Counter{}
	for name, value := range engines {
		counters[strings.ToLower(strings.Replace(name, "Engines", "-engines", 1))] = resourceapi.Counter{Value: quantity(value, resource.BinarySI)}
	}
	for n := range at.Size {
		counters[fmt.Sprintf("memory-slice-%d", at.Start+n)] = resourceapi.Counter{Value: quantity(1, resource.BinarySI)}
	}
	return counters
}
