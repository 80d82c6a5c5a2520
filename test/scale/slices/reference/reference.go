// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package reference makes the ResourceSlices that NVIDIA's DRA driver publishes, to compare with. It
// does not use what Partage publishes, so that the comparison stays the same when that changes.
package reference

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Pool is whose slices they are.
type Pool struct {
	// Driver is the name of the driver, Node that of the node and of its pool.
	Driver, Node string
}

// ResourceSlices has the names, attributes, capacities, counters and order of NVIDIA's DRA driver (v0.5,
// feature gate DynamicMIG, Kubernetes 1.35 and later): one slice with all counter sets, and for each
// GPU one with its devices, sorted by name.
func (p Pool) ResourceSlices(node *gpu.Node) []resourceapi.ResourceSlice {
	made := make([]resourceapi.ResourceSlice, 1+len(node.GPUs))
	for n := range node.GPUs {
		g := &node.GPUs[n]
		set := fmt.Sprintf("gpu-%d-counter-set", g.Minor)
		whole := map[string]int64{}
		var devices []resourceapi.Device
		for _, profile := range g.MIG.Profiles {
			amounts := amountsOf(profile.Resources)
			for name, value := range amounts {
				whole[name] = max(whole[name], value)
			}
			for _, at := range profile.Placements {
				devices = append(devices, resourceapi.Device{
					Name:             fmt.Sprintf("gpu-%d-mig-%s-%d-%d", g.Minor, strings.NewReplacer(".", "", "+", "-").Replace(profile.Name), profile.ID, at.Start),
					Attributes:       partitionAttributes(node, g, profile.Name),
					Capacity:         capacities(amounts),
					ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counters(amounts, at)}},
				})
			}
		}
		all := counters(whole, gpu.Placement{Size: g.MIG.MemorySlices})
		devices = append(devices, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", g.Minor), Attributes: wholeAttributes(node, g), Capacity: capacities(whole),
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: all}},
		})
		slices.SortFunc(devices, func(a, b resourceapi.Device) int { return cmp.Compare(a.Name, b.Name) })
		made[0].Spec.SharedCounters = append(made[0].Spec.SharedCounters, resourceapi.CounterSet{Name: set, Counters: all})
		made[1+n].Spec.Devices = devices
	}
	return p.Complete(made)
}

// Complete gives the slices of a node their names and pool.
func (p Pool) Complete(made []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	for n := range made {
		made[n].Name = fmt.Sprintf("%s-%s-%03d", p.Node, p.Driver, n)
		spec := &made[n].Spec
		spec.Driver, spec.NodeName = p.Driver, &p.Node
		spec.Pool = resourceapi.ResourcePool{Name: p.Node, Generation: 1, ResourceSliceCount: int64(len(made))}
	}
	return made
}

// amountsOf are capacities, and the counters that a partition draws of each.
func amountsOf(r gpu.Resources) map[string]int64 {
	return map[string]int64{
		"memory": int64(r.MemoryBytes), "multiprocessors": int64(r.Multiprocessors), "copyEngines": int64(r.CopyEngines),
		"decoders": int64(r.Decoders), "encoders": int64(r.Encoders), "jpegEngines": int64(r.JPEGEngines), "ofaEngines": int64(r.OFAEngines),
	}
}

func capacities(amounts map[string]int64) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	made := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
	for name, value := range amounts {
		made[resourceapi.QualifiedName(name)] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(value, resource.BinarySI)}
	}
	return made
}

func counters(amounts map[string]int64, at gpu.Placement) map[string]resourceapi.Counter {
	made := map[string]resourceapi.Counter{}
	for name, value := range amounts {
		made[strings.ToLower(strings.Replace(name, "Engines", "-engines", 1))] = resourceapi.Counter{Value: *resource.NewQuantity(value, resource.BinarySI)}
	}
	for n := range at.Size {
		made[fmt.Sprintf("memory-slice-%d", at.Start+n)] = resourceapi.Counter{Value: *resource.NewQuantity(1, resource.BinarySI)}
	}
	return made
}

type attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

func wholeAttributes(node *gpu.Node, g *gpu.GPU) attributes {
	a := commonAttributes(node, g)
	a["type"], a["uuid"] = text("gpu"), text(g.UUID)
	return a
}

func partitionAttributes(node *gpu.Node, g *gpu.GPU, profile string) attributes {
	a := commonAttributes(node, g)
	a["type"], a["parentUUID"], a["profile"] = text("mig"), text(g.UUID), text(profile)
	return a
}

func commonAttributes(node *gpu.Node, g *gpu.GPU) attributes {
	a := attributes{
		"productName": text(g.ProductName), "brand": text("Nvidia"), "architecture": text(g.Architecture),
		"cudaComputeCapability": version(twoPart(g.ComputeCapability)), "cudaDriverVersion": version(twoPart(node.CUDAVersion)),
		"driverVersion": version(semantic(node.DriverVersion)), "addressingMode": text(g.AddressingMode),
		"resource.kubernetes.io/pciBusID": text(g.PCIAddress), "resource.kubernetes.io/pcieRoot": text(g.PCIeRoot),
	}
	if g.NUMANode != nil {
		numa := int64(*g.NUMANode)
		a["resource.kubernetes.io/numaNode"] = resourceapi.DeviceAttribute{IntValue: &numa}
	}
	return a
}

func text(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}

func version(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{VersionValue: &value}
}

func twoPart(v gpu.Version) string { return fmt.Sprintf("%d.%d.0", v.Major, v.Minor) }

// semantic removes the zeros that NVIDIA's versions have and semantic versions must not have.
func semantic(driverVersion string) string {
	parts := strings.Split(driverVersion, ".")
	for i, part := range parts {
		parts[i] = cmp.Or(strings.TrimLeft(part, "0"), "0")
	}
	return strings.Join(parts, ".")
}
