// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"cmp"
	"errors"
	"io/fs"
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/node/host"
)

// GPU adds the device node of a GPU.
type GPU struct {
	Roots      host.Roots
	PCIAddress string
}

// Edits reads the node's numbers from the host: they change when the driver is
// loaded again.
func (g GPU) Edits() (cdi.Edits, error) {
	node, _, err := g.node()
	if err != nil {
		return cdi.Edits{}, err
	}
	return cdi.Edits{Nodes: []cdi.Node{node}}, nil
}

func (g GPU) node() (found cdi.Node, gpuMinor int, err error) {
	gpuMinor, err = g.Roots.GPUMinor(g.PCIAddress)
	if err != nil {
		return cdi.Node{}, 0, err
	}
	path := "/dev/nvidia" + strconv.Itoa(gpuMinor)
	node, err := g.Roots.Node(path)
	if err != nil {
		return cdi.Node{}, 0, err
	}
	return newNode(node.Root, path, node.Major, node.Minor), gpuMinor, nil
}

// Partition adds the device node of a partition's GPU and the capability nodes of
// its GPU instance and its compute instance.
type Partition struct {
	Roots      host.Roots
	PCIAddress string
	// InstanceID and ComputeID are the numbers of the two instances.
	InstanceID, ComputeID int
}

// Edits reads the numbers of the nodes from the host: those of capabilities change
// with every instance. It fails if an instance does not exist.
func (p Partition) Edits() (cdi.Edits, error) {
	gpu, gpuMinor, err := GPU{Roots: p.Roots, PCIAddress: p.PCIAddress}.node()
	if err != nil {
		return cdi.Edits{}, err
	}
	major, majorErr := p.Roots.CapabilityMajor()
	instance, instanceErr := p.Roots.InstanceCapability(gpuMinor, p.InstanceID)
	compute, computeErr := p.Roots.ComputeCapability(gpuMinor, p.InstanceID, p.ComputeID)
	if err := cmp.Or(majorErr, instanceErr, computeErr); err != nil {
		return cdi.Edits{}, err
	}
	return cdi.Edits{Nodes: []cdi.Node{gpu, capabilityNode(p.Roots, major, instance), capabilityNode(p.Roots, major, compute)}}, nil
}

// Monitor adds the capability node without which a container sees no MIG instances of
// its GPUs, unless it is privileged. It adds nothing where the driver has no MIG.
type Monitor struct {
	Roots host.Roots
}

// Edits reads the node's numbers from the host.
func (m Monitor) Edits() (cdi.Edits, error) {
	minor, err := m.Roots.MonitorCapability()
	if errors.Is(err, fs.ErrNotExist) {
		return cdi.Edits{}, nil
	}
	if err != nil {
		return cdi.Edits{}, err
	}
	major, err := m.Roots.CapabilityMajor()
	if err != nil {
		return cdi.Edits{}, err
	}
	return cdi.Edits{Nodes: []cdi.Node{capabilityNode(m.Roots, major, minor)}}, nil
}

// capabilityNode returns a node of which nobody needs the file: nvidia-modprobe and the
// container toolkit make it on the host, often not before somebody asks. The runtime makes
// that of the container from its numbers.
func capabilityNode(roots host.Roots, major, minor int64) cdi.Node {
	return newNode(roots.DevRoot(), "/dev/nvidia-caps/nvidia-cap"+strconv.FormatInt(minor, 10), major, minor)
}

func newNode(root host.DevRoot, path string, major, minor int64) cdi.Node {
	return cdi.Node{Path: path, HostPath: filepath.Join(root.OnHost, path), Major: major, Minor: minor}
}
