// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/cdi"
)

// cdiDevices finds the device nodes of everything in a record, as they are now:
// minors move at every boot and capabilities with every instance. All partitions
// must be live.
func (m *Manager) cdiDevices(r *Record) ([]cdi.Device, error) {
	minors := m.minors()
	var devices []cdi.Device
	for i := range r.Devices {
		d := &r.Devices[i]
		minor, found := minors[d.PCIAddress]
		if !found {
			return nil, fmt.Errorf("device %s: there is no GPU %s any more", d.Device, d.PCIAddress)
		}
		nodes, err := m.nodes(d, minor)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Device, err)
		}
		c := cdi.Device{Name: d.name(), Edits: cdi.Edits{Nodes: nodes}}
		if d.Sharing != nil && d.Sharing.Session != "" {
			err = m.connect(&c, r, d)
		}
		if d.limited() {
			err = errors.Join(err, m.limits.edit(&c, r, d))
		}
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Device, err)
		}
		devices = append(devices, c)
	}
	return devices, nil
}

// minors are those of all GPUs by PCI address.
func (m *Manager) minors() map[string]int {
	minors := map[string]int{}
	if inventory := m.inventory.Load(); inventory != nil {
		for _, d := range inventory.Devices() {
			minors[d.GPU.PCIAddress] = d.GPU.Minor
		}
	}
	return minors
}

func (m *Manager) nodes(d *DeviceRecord, gpuMinor int) ([]cdi.Node, error) {
	path := "/dev/nvidia" + strconv.Itoa(gpuMinor)
	major, minor, err := m.roots.CharDevice(path)
	if err != nil {
		return nil, err
	}
	nodes := []cdi.Node{m.node(path, major, minor)}
	if d.Partition == nil {
		return nodes, nil
	}
	live := d.Partition.Live
	if live == nil {
		return nil, fmt.Errorf("the partition with %s is not live", d.address())
	}
	major, err = m.roots.CapabilityMajor()
	if err != nil {
		return nil, err
	}
	instance, err := m.roots.InstanceCapability(gpuMinor, live.InstanceID)
	if err != nil {
		return nil, err
	}
	compute, err := m.roots.ComputeCapability(gpuMinor, live.InstanceID, live.ComputeID)
	if err != nil {
		return nil, err
	}
	for _, minor := range []int64{instance, compute} {
		nodes = append(nodes, m.node("/dev/nvidia-caps/nvidia-cap"+strconv.FormatInt(minor, 10), major, minor))
	}
	return nodes, nil
}

func (m *Manager) node(path string, major, minor int64) cdi.Node {
	return cdi.Node{Path: path, HostPath: filepath.Join(m.roots.HostDev, path), Major: major, Minor: minor}
}
