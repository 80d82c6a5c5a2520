// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet reads what a cluster has that concerns GPUs, and makes a model of it: nodes,
// their GPUs, the devices of each, and which claims and pods have them.
//
// A Snapshot is what was read, a Model what follows from it. Both are never changed once they
// are made, so that any number of goroutines may read them.
package fleet

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Model is what a driver's part of a Snapshot means.
type Model struct {
	*Snapshot
	// Driver is the one whose devices the model has.
	Driver string
	// Nodes are those with devices of the driver, by name.
	Nodes []*Node
	// Holdings are all that claims have of the driver's devices, in the order of claims.
	Holdings []*Holding
}

// GPUs goes through those of all nodes.
func (m *Model) GPUs() iter.Seq[*GPU] {
	return func(yield func(*GPU) bool) {
		for _, n := range m.Nodes {
			for _, g := range n.GPUs {
				if !yield(g) {
					return
				}
			}
		}
	}
}

// Devices goes through those of all GPUs.
func (m *Model) Devices() iter.Seq[*Device] {
	return func(yield func(*Device) bool) {
		for g := range m.GPUs() {
			for _, d := range g.Devices {
				if !yield(d) {
					return
				}
			}
		}
	}
}

// Node is a node with devices of the driver.
type Node struct {
	Name string
	// Object is nil if it could not be read, or does not exist.
	Object *corev1.Node
	// GPUs are in the order of their PCI addresses.
	GPUs []*GPU
	// Incomplete says that not all slices of the pool's newest generation are there: the
	// scheduler allocates nothing of it.
	Incomplete bool
	// Hidden says that claims or taint rules may exist that could not be read: what looks free may be taken.
	Hidden bool
	// AtLeast says that it is claims that could not be read: those that are known to share a device are not all that may.
	AtLeast bool
}

// GPU is a physical GPU with all devices that the driver offers of it.
type GPU struct {
	Node *Node
	// Index is its place among the GPUs of its node.
	Index int
	// Name is that of its counter set, and of the device that is the whole GPU: gpu-0000-1b-00-0.
	Name                                 string
	UUID, ProductName, Architecture      string
	PCIBusID, DriverVersion, CUDAVersion string
	// MemoryBytes is what the GPU offers, 0 if unknown.
	MemoryBytes int64
	// Cells are the memory slices that have a counter of their own, by index; none if the GPU cannot be
	// partitioned. A slice that no partition has without the one
	// before it has no counter and is part of that one's cell: of the eight slices of an H100
	// seven have a counter, of the twelve of an RTX PRO 6000 four.
	Cells []int
	// Devices are all that the slices have, in their order: that of preference.
	Devices []*Device

	// counters are what the devices draw from together, in thousandths.
	counters map[string]int64
}

// Types of devices.
const (
	TypeGPU       = "gpu"
	TypeMIG       = "mig"
	TypeMPS       = "mps"
	TypeTimeSlice = "timeslice"
	TypeObserver  = "observer"
)

// KindText is what people call a device of a type and profile: the profile of a partition says its type.
func KindText(kind, profile string) string {
	if kind == TypeMIG && profile != "" {
		return profile
	}
	return strings.TrimSpace(profile + " " + kind)
}

// Capacities of devices that the commands speak of.
const (
	CapacityMemory    = "memory"
	CapacityShares    = "shares"
	CapacitySMPercent = "smPercent"
)

// Device is one of a GPU. It is one of the kinds that the attribute "type" names.
type Device struct {
	GPU *GPU
	// Pool and Name identify it, together with the driver.
	Pool, Name string
	// Type is gpu, mig, mps, timeslice or observer; Profile is that of a partition, or of the
	// partition that is shared.
	Type, Profile string
	// UUID is "" for a partition that does not exist yet.
	UUID string
	// Isolation is the attribute.
	Isolation string
	// Placement are the memory slices that it uses, by index. It is empty where the device is
	// the whole GPU and on GPUs that cannot be partitioned.
	Placement []int
	// Taints are those of the slice and of DeviceTaintRules.
	Taints []resourceapi.DeviceTaint
	// Holdings are the claims that have it.
	Holdings []*Holding
	// Published is the device as it is in its slice.
	Published *resourceapi.Device
}

// Shared reports whether several claims can have the device at once.
func (d *Device) Shared() bool { return ptr.Deref(d.Published.AllowMultipleAllocations, false) }

// Tainted reports whether a taint keeps the device from claims that do not tolerate it.
func (d *Device) Tainted() bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
}

// Held returns the claims that take the device from others: all but those with admin access.
func (d *Device) Held() []*Holding {
	return slices.DeleteFunc(slices.Clone(d.Holdings), (*Holding).Admin)
}

// Admin reports whether the claim has the device beside those who use it.
func (h *Holding) Admin() bool { return ptr.Deref(h.Result.AdminAccess, false) }

// Alone reports whether others cannot have a share of the device.
func (h *Holding) Alone() bool { return h.Result.ShareID == nil }

// Holding is one device, or share of one, that is allocated to a claim.
type Holding struct {
	Claim *resourceapi.ResourceClaim
	// Result is the claim's.
	Result *resourceapi.DeviceRequestAllocationResult
	// Device is nil if no slice has it.
	Device *Device
	// Pods are those that the claim is reserved for and that could be read.
	Pods []*corev1.Pod
	// Status is the driver's entry in the claim's status, or nil.
	Status *resourceapi.AllocatedDeviceStatus
}

// ShortAddress is a PCI address without what the addresses of all GPUs have in common.
func ShortAddress(address string) string {
	return strings.TrimSuffix(strings.TrimPrefix(address, "0000:"), ".0")
}

// Label is what people call the GPU of a node: its place there, and its short address.
func (g *GPU) Label() string {
	if g.PCIBusID == "" {
		return fmt.Sprintf("GPU %d", g.Index)
	}
	return fmt.Sprintf("GPU %d (%s)", g.Index, ShortAddress(g.PCIBusID))
}

// Path names the GPU to commands, such as node-1/1b:00.
func (g *GPU) Path() string {
	return g.Node.Name + "/" + cmp.Or(ShortAddress(g.PCIBusID), strconv.Itoa(g.Index))
}

// GPU finds the one that people name: NODE/ and its place there, its PCI address, short or not, or its name.
func (m *Model) GPU(path string) (*GPU, error) {
	name, of, _ := strings.Cut(path, "/")
	at := slices.IndexFunc(m.Nodes, func(n *Node) bool { return n.Name == name })
	if at < 0 {
		return nil, fmt.Errorf("%s: node %q has no devices of driver %s; kubectl gpu tree shows those that have", path, name, m.Driver)
	}
	of = strings.ToLower(of)
	var labels []string
	for _, g := range m.Nodes[at].GPUs {
		if of != "" && slices.Contains([]string{strconv.Itoa(g.Index), g.PCIBusID, ShortAddress(g.PCIBusID), g.Name}, of) {
			return g, nil
		}
		labels = append(labels, g.Path())
	}
	return nil, fmt.Errorf("%s: node %s has no such GPU; it has %s", path, name, strings.Join(labels, ", "))
}

// Taint is one of some of a GPU's devices.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
	// Devices is how many have it, of all but observers.
	Devices int `json:"devices"`
	Of      int `json:"of"`
}

// Taints returns those of the GPU's devices, each once.
func (g *GPU) Taints() []Taint {
	var out []Taint
	of := 0
	for _, d := range g.Devices {
		// An observer is tainted so that nobody has it without admin access.
		if d.Type == TypeObserver {
			continue
		}
		of++
		for _, t := range d.Taints {
			i := slices.IndexFunc(out, func(o Taint) bool { return o.Key == t.Key && o.Value == t.Value && o.Effect == string(t.Effect) })
			if i < 0 {
				i, out = len(out), append(out, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
			}
			out[i].Devices++
		}
	}
	for i := range out {
		out[i].Of = of
	}
	return out
}

// Cordoned is the problem of a node that an administrator has cordoned.
const Cordoned = "cordoned"

// Problems returns what keeps pods from a node.
func (n *Node) Problems() []string {
	var out []string
	if n.Incomplete {
		out = append(out, "ResourceSlices are missing: nothing can be allocated")
	}
	if n.Object == nil {
		return out
	}
	if n.Object.Spec.Unschedulable {
		out = append(out, Cordoned)
	}
	for _, c := range n.Object.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			out = append(out, strings.TrimSuffix("not ready: "+c.Reason, ": "))
		}
	}
	return out
}

// OutOfUse reports whether no claim can have anything of the GPU that it does not have already: the driver has tainted all of it, or its node
// takes no pods. What people taint is for those who tolerate it.
func (g *GPU) OutOfUse(driver string) bool {
	return len(g.Node.Problems()) > 0 || !slices.ContainsFunc(g.Devices, func(d *Device) bool {
		return d.Type != TypeObserver && !slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Effect != resourceapi.DeviceTaintEffectNone && strings.HasPrefix(t.Key, driver+"/")
		})
	})
}
