// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Values of the attribute "isolation", strongest first: what keeps the claims that
// have a device apart, and apart from those that have other devices of the same GPU.
const (
	// isolationHardware: separate hardware paths. Claims that own a GPU or a MIG
	// partition share no hardware that carries state.
	isolationHardware = "hardware"
	// isolationProcess: MPS clients of a GPU have address spaces of their own and a limit for
	// multiprocessors, but one server: a fatal fault of one ends all. Client priorities are hints
	// and change nothing. The limits may add up to more than the GPU (Share.Percent), so that
	// none of its multiprocessors are kept free for a claim.
	isolationProcess = "process"
	// isolationSoftware: limits for programs that do not get around them. A library in the
	// containers sets them, or MPS on a partition: EXCLUSIVE_PROCESS, which keeps programs
	// from running beside the server, "is not supported when the GPU is in MIG mode" (MIG
	// user guide).
	isolationSoftware = "software"
	// isolationNone: time-sliced clients share the memory, a fault of one affects the
	// whole GPU until it is reset, and each waits for the full time slices of the
	// others.
	isolationNone = "none"
)

// isolationOf is one attribute and not one each for memory, compute, faults and
// latency: the mechanism decides all of them. The same holds between the clients of
// a shared partition.
func isolationOf(d Device) string {
	switch {
	case d.Kind == MPS && d.Partition == nil:
		return isolationProcess
	case d.Kind == MPS, d.Kind == TimeSlice && d.Share.Limited:
		return isolationSoftware
	case d.Kind == TimeSlice || d.Kind == Observer:
		return isolationNone
	}
	return isolationHardware
}

// memoryLimitOf is the value of the attribute "memoryLimit": who holds claims to their part of the memory. It does not apply to
// what one claim has alone.
func memoryLimitOf(d Device) string {
	switch {
	case d.Share == nil:
		return ""
	case d.Share.Held:
		return "driver"
	case d.Kind == MPS:
		return "server"
	case d.Share.Limited:
		return "client"
	}
	return "none"
}

type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// attributesOf returns the same names for all devices, so that a selector can read any of them in
// any class: a missing one is an error that ends the pod's scheduling attempt. Attributes that do
// not apply are empty. Missing is only what the hardware or the host does not tell, and, on all but
// whole GPUs, what groups them. Names without a domain belong to the driver.
func (b board) attributesOf(d Device) attributes {
	a := attributes{}
	a.identify(d)
	a.describe(b.node, d.GPU)
	a.locate(d.GPU)
	if d.Kind == Whole {
		a.group(GroupsOf(b.node)[d.GPU.PCIAddress])
	}
	if b.extended && d.Kind != Observer { // which gives a pod nothing, so that no resource stands for it
		a[ExtendedResources] = resourceapi.DeviceAttribute{BoolValue: new(true)}
	}
	return a
}

// identify says what the device is.
func (a attributes) identify(d Device) {
	a.text("type", string(d.Kind))
	a.text("isolation", isolationOf(d))
	a.text("memoryLimit", memoryLimitOf(d))
	a.text("parentUUID", d.GPU.UUID)
	profile, uuid := "", d.GPU.UUID
	if d.Partition != nil {
		profile, uuid = d.Partition.Profile.Name, "" // it gets one when it is made
	}
	if d.Static != nil {
		uuid = d.Static.UUID
	}
	a.text("profile", profile)
	a.text("uuid", uuid)
}

// describe says what programs find on the GPU.
func (a attributes) describe(node *gpu.Node, g *gpu.GPU) {
	a.text("productName", g.ProductName)
	a.text("brand", g.Brand)
	a.text("architecture", g.Architecture)
	a.version("cudaComputeCapability", twoPartVersion(g.ComputeCapability))
	a.version("driverVersion", semanticVersion(node.DriverVersion))
	a.version("cudaDriverVersion", twoPartVersion(node.CUDAVersion))
	if g.AddressingMode != "" {
		a.text("addressingMode", g.AddressingMode)
	}
}

// locate says where the GPU is, for selectors, and for constraints with devices of other drivers.
func (a attributes) locate(g *gpu.GPU) {
	a.text(deviceattribute.StandardDeviceAttributePCIBusID, g.PCIAddress)
	if g.PCIeRoot != "" {
		a.text(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	}
	if g.NUMANode != nil {
		numaNode := int64(*g.NUMANode)
		a[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &numaNode}
	}
}

// group says which GPUs of the node the GPU is close to, for constraints between whole GPUs: a
// partition has no peers. What would be true of no other GPU is left out, as is what the host does
// not tell of a GPU's place: matchAttribute takes no device without the attribute.
func (a attributes) group(g Groups) {
	if g.NVLinkDomain != "" {
		a.text("nvlinkDomain", g.NVLinkDomain)
	}
	if g.PCIeSwitch != "" {
		a.text("pcieSwitch", g.PCIeSwitch)
	}
}

// text truncates the value to the 64 bytes that the API allows; only product names
// come near that.
func (a attributes) text(name resourceapi.QualifiedName, value string) {
	value = strings.ToValidUTF8(value, "?")
	value = strings.ToValidUTF8(value[:min(len(value), resourceapi.DeviceAttributeMaxValueLength)], "") // without half a character
	a[name] = resourceapi.DeviceAttribute{StringValue: &value}
}

func (a attributes) version(name resourceapi.QualifiedName, value string) {
	a[name] = resourceapi.DeviceAttribute{VersionValue: &value}
}

// AttributesOf returns the attributes with which a device is published, or nil if the inventory
// does not have it. The caller owns the map.
func (i *Inventory) AttributesOf(name string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	d, _ := i.Lookup(name)
	for _, b := range i.boards {
		if b.gpu == d.GPU {
			return b.attributesOf(d)
		}
	}
	return nil
}
