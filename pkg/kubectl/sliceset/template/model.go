// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package template makes ResourceSlices of nodes that do not exist yet. An autoscaler needs
// them to know what a new node of a group would offer, as long as the group has no node.
//
// They are made by the driver's own code, from what is known of a model of GPU, or from the
// slices of a node that is like the new ones. What differs between nodes is a placeholder:
// names, PCI addresses and UUIDs, which are different for each GPU, so that claims can ask for
// two devices of one GPU.
package template

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/generation"
	"github.com/partage-dev/partage/pkg/policy"
)

// maxGPUs is more than any machine has.
const maxGPUs = 32

// Machine is what nodes are made of.
type Machine struct {
	// Model is the name of one of boards.Names, and Count how many GPUs a node has.
	Model string
	Count int
	// DriverVersion is that of the NVIDIA driver, such as 580.95.05, and CUDAVersion what it
	// supports. Where they are not set they are those with which the model is known.
	DriverVersion string
	CUDAVersion   gpu.Version
	// MIG says that MIG mode is on. It matters where the mode does not follow the claims.
	MIG bool
}

// Options say how slices are made.
type Options struct {
	// Driver is the driver's name, Node that of the node and of its pool.
	Driver, Node string
	// Policy is nil for the built-in one.
	Policy *policy.Policy
}

// Facts returns what such a machine reports. PCIe roots and NUMA nodes are left out: they
// depend on the machine.
func (m Machine) Facts() (*gpu.Node, error) {
	if m.Count < 1 || m.Count > maxGPUs {
		return nil, fmt.Errorf("%d GPUs: a node has 1 to %d", m.Count, maxGPUs)
	}
	node, err := boards.Load(m.Model)
	if err != nil {
		return nil, err
	}
	node.DriverVersion = cmp.Or(m.DriverVersion, node.DriverVersion)
	node.CUDAVersion = cmp.Or(m.CUDAVersion, node.CUDAVersion)
	one := node.GPUs[0]
	if m.MIG {
		if one.MIG == nil {
			return nil, fmt.Errorf("the GPU model %s has no MIG mode that could be on", m.Model)
		}
		// The NVIDIA driver does not say then what it keeps of the undivided GPU.
		one.MIG.Enabled, one.ReservedBytes = true, 0
	}
	node.GPUs = nil
	for i := range m.Count {
		g := one
		g.PCIAddress = address(i)
		g.UUID = placeholder(i)
		g.Minor, g.PCIeRoot, g.NUMANode = i, "", nil
		node.GPUs = append(node.GPUs, g)
	}
	return node, nil
}

// address of a GPU. Those of real nodes are others.
func address(i int) string {
	const firstBus, distance = 0x10, 7
	return fmt.Sprintf("0000:%02x:00.0", firstBus+distance*i)
}

// placeholder is the UUID of a GPU.
func placeholder(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }

// Slices returns what the driver would publish on such a machine, with a kubelet that knows
// extended resources, and what it could not do as the policy wants it.
func (m Machine) Slices(o Options) (made []resourceapi.ResourceSlice, problems []string, err error) {
	facts, err := m.Facts()
	if err != nil {
		return nil, nil, err
	}
	inventory, err := device.NewInventory(facts, device.Terms{Policy: o.Policy, ExtendedResources: true})
	if err != nil {
		return nil, nil, fmt.Errorf("determine the devices of %d GPUs %s: %w", m.Count, m.Model, err)
	}
	for _, problem := range inventory.Problems() {
		problems = append(problems, problem.Error())
	}
	if o.Policy != nil {
		for _, rule := range o.Policy.Rules {
			if rule.Match.UUID != "" {
				problems = append(problems, fmt.Sprintf("the rule %q of the policy is for the GPU %s, which no template is of", rule.Name, rule.Match.UUID))
			}
		}
		for _, unknown := range o.Policy.UnknownProfiles(facts.GPUs) {
			problems = append(problems, unknown.String())
		}
	}
	made = inventory.ResourceSlices(device.Options{
		Driver: o.Driver, Pool: o.Node, NodeName: o.Node, PartitionableDevices: true, ConsumableCapacity: true,
	})
	if len(made) == 0 {
		problems = append(problems, "the policy offers nothing of these GPUs, so that there are no slices")
	}
	return made, problems, nil
}

// Strip makes a template of the slices of a live node. It takes away what is only this node's:
// names, UUIDs, taints for what is wrong at the moment, partitions that somebody made by hand,
// and devices that are there only because claims still have them. PCI addresses, PCIe roots and
// NUMA nodes stay: machines of one kind have the same.
func Strip(published []*resourceapi.ResourceSlice, node string, o Options) ([]resourceapi.ResourceSlice, error) {
	current, err := newest(published, node, o.Driver)
	if err != nil {
		return nil, err
	}
	s := &stripper{driver: o.Driver, gpus: map[string]string{}}
	var made []resourceapi.ResourceSlice
	for _, slice := range current {
		spec := slice.Spec.DeepCopy()
		spec.Devices = s.devices(spec.Devices)
		if len(spec.Devices) == 0 && len(spec.SharedCounters) == 0 {
			continue
		}
		made = append(made, resourceapi.ResourceSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"}, Spec: *spec,
		})
	}
	for i := range made {
		m := &made[i]
		// As device.Inventory names them.
		m.Name = fmt.Sprintf("%s-%s-%03d", o.Node, o.Driver, i)
		m.Spec.NodeName = &o.Node
		m.Spec.Pool = resourceapi.ResourcePool{Name: o.Node, Generation: 1, ResourceSliceCount: int64(len(made))}
	}
	return made, nil
}

// newest returns the slices of the newest generation of a node's pool, by name.
func newest(published []*resourceapi.ResourceSlice, node, driver string) ([]*resourceapi.ResourceSlice, error) {
	var pool []*resourceapi.ResourceSlice
	for _, s := range published {
		if s.Spec.Driver != driver || ptr.Deref(s.Spec.NodeName, "") != node {
			continue
		}
		if pool = append(pool, s); pool[0].Spec.Pool.Name != s.Spec.Pool.Name {
			return nil, fmt.Errorf("node %s has two pools of the driver %s, %s and %s", node, driver, pool[0].Spec.Pool.Name, s.Spec.Pool.Name)
		}
	}
	current, complete := generation.Newest(pool)
	if len(current) == 0 {
		return nil, fmt.Errorf("node %s has no ResourceSlices of the driver %s", node, driver)
	}
	if !complete {
		return nil, fmt.Errorf("node %s has %d of %d ResourceSlices of the driver %s: its devices are being published, try again",
			node, len(current), current[0].Spec.Pool.ResourceSliceCount, driver)
	}
	slices.SortFunc(current, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return current, nil
}

// stripper replaces UUIDs: each GPU's by one placeholder.
type stripper struct {
	driver string
	gpus   map[string]string
}

// devices returns those that a new node would have.
func (s *stripper) devices(all []resourceapi.Device) []resourceapi.Device {
	var kept []resourceapi.Device
	for i := range all {
		d := &all[i]
		if s.ofTheMoment(d) {
			continue
		}
		d.Taints = slices.DeleteFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key != s.taint(device.AdminAccess) })
		for j := range d.Taints {
			d.Taints[j].TimeAdded = nil
		}
		if len(d.Taints) == 0 {
			d.Taints = nil
		}
		s.replace(d, "uuid")
		s.replace(d, "parentUUID")
		s.replace(d, "nvlinkDomain")
		kept = append(kept, *d)
	}
	return kept
}

func (s *stripper) taint(r device.Reason) string { return s.driver + "/" + string(r) }

// ofTheMoment reports whether a device exists for what somebody did on the node, or for claims
// that still have it.
func (s *stripper) ofTheMoment(d *resourceapi.Device) bool {
	static := ptr.Deref(d.Attributes["type"].StringValue, "") == string(device.Partition) && ptr.Deref(d.Attributes["uuid"].StringValue, "") != ""
	return static || slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == s.taint(device.Withdrawn) })
}

// replace replaces a UUID in an attribute.
func (s *stripper) replace(d *resourceapi.Device, attribute resourceapi.QualifiedName) {
	a, has := d.Attributes[attribute]
	uuid := ptr.Deref(a.StringValue, "")
	if !has || !strings.HasPrefix(uuid, "GPU-") {
		return
	}
	if _, known := s.gpus[uuid]; !known {
		s.gpus[uuid] = placeholder(len(s.gpus))
	}
	d.Attributes[attribute] = resourceapi.DeviceAttribute{StringValue: new(s.gpus[uuid])}
}
