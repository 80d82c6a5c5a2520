// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Values of the isolation attributes. Whole GPUs and MIG partitions share the
// strongest of each.
const (
	// isolationHardware: separate hardware paths; other tenants cannot get in.
	isolationHardware = "hardware"
	// jitterNegligible: neighbours do not show in latencies.
	jitterNegligible = "negligible"
)

type (
	attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
	capacities map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
)

// attributesOf has the same names for all devices of a GPU, so that a selector
// can read any of them on any device: a missing one is an error that ends the
// pod's scheduling attempt. What does not apply is empty. Names without a
// domain belong to the driver.
func attributesOf(node *gpu.Node, d Device) attributes {
	g := d.GPU
	a := attributes{}
	a.text("type", string(d.Kind))
	a.text("parentUUID", g.UUID)
	a.text("productName", g.ProductName)
	a.text("brand", g.Brand)
	a.text("architecture", g.Architecture)
	switch {
	case d.Static != nil:
		a.text("profile", d.Partition.Profile.Name)
		a.text("uuid", d.Static.UUID)
	case d.Partition != nil:
		a.text("profile", d.Partition.Profile.Name)
		a.text("uuid", "") // it gets one when it is made
	default:
		a.text("profile", "")
		a.text("uuid", g.UUID)
	}
	a.version("cudaComputeCapability", twoPartVersion(g.ComputeCapability))
	a.version("driverVersion", semanticVersion(node.DriverVersion))
	a.version("cudaDriverVersion", twoPartVersion(node.CUDAVersion))
	a.text("memoryIsolation", isolationHardware)
	a.text("computeIsolation", isolationHardware)
	a.text("faultIsolation", isolationHardware)
	a.text("latencyJitter", jitterNegligible)
	if g.AddressingMode != "" {
		a.text("addressingMode", g.AddressingMode)
	}
	a.text(deviceattribute.StandardDeviceAttributePCIBusID, g.PCIAddress)
	if g.PCIeRoot != "" {
		a.text(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	}
	if g.NUMANode != nil {
		numaNode := int64(*g.NUMANode)
		a[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &numaNode}
	}
	return a
}

// capacitiesOf has the same names for all devices; 0 means not known.
func capacitiesOf(d Device) capacities {
	r := d.GPU.Resources
	if d.Partition != nil {
		r = d.Partition.Profile.Resources
	}
	return capacities{
		"memory":          {Value: *resource.NewQuantity(int64(r.MemoryBytes), resource.BinarySI)},
		"multiprocessors": {Value: *resource.NewQuantity(int64(r.Multiprocessors), resource.DecimalSI)},
		"copyEngines":     {Value: *resource.NewQuantity(int64(r.CopyEngines), resource.DecimalSI)},
		"decoders":        {Value: *resource.NewQuantity(int64(r.Decoders), resource.DecimalSI)},
		"encoders":        {Value: *resource.NewQuantity(int64(r.Encoders), resource.DecimalSI)},
		"jpegEngines":     {Value: *resource.NewQuantity(int64(r.JPEGEngines), resource.DecimalSI)},
		"ofaEngines":      {Value: *resource.NewQuantity(int64(r.OFAEngines), resource.DecimalSI)},
	}
}

// text cuts the value to the 64 bytes that the API allows; only product names
// have ever been near that.
func (a attributes) text(name resourceapi.QualifiedName, value string) {
	value = strings.ToValidUTF8(value, "?")
	if len(value) > resourceapi.DeviceAttributeMaxValueLength {
		end := resourceapi.DeviceAttributeMaxValueLength
		for !utf8.RuneStart(value[end]) {
			end--
		}
		value = value[:end]
	}
	a[name] = resourceapi.DeviceAttribute{StringValue: &value}
}

func (a attributes) version(name resourceapi.QualifiedName, value string) {
	a[name] = resourceapi.DeviceAttribute{VersionValue: &value}
}
