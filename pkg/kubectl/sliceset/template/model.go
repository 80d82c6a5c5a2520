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

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
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
