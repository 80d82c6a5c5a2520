// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

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
	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

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
