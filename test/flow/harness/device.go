// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Limits of an MPS share whose Device has none. Four such shares fit on each GPU and
// partition that the tests share.
const (
	SomeMemory  = 4 << 30
	SomePercent = 25
)

// consumed is the capacity of a share as the scheduler records it.
func (d Device) consumed() map[resourceapi.QualifiedName]resource.Quantity {
	if d.Kind == MPS {
		d.Memory, d.Percent = cmp.Or(d.Memory, SomeMemory), cmp.Or(d.Percent, SomePercent)
	}
	all := map[resourceapi.QualifiedName]resource.Quantity{"shares": *resource.NewQuantity(1, resource.DecimalSI)}
	if d.Memory > 0 {
		all["memory"] = *resource.NewQuantity(d.Memory, resource.BinarySI)
	}
	if d.Percent > 0 {
		all["smPercent"] = *resource.NewQuantity(int64(d.Percent), resource.DecimalSI)
	}
	return all
}

// BaseDeviceName is the name of the device that a share is part of.
func BaseDeviceName(device string) string {
	for _, k := range []ShareKind{MPS, TimeSlice} {
		device = strings.TrimSuffix(device, "-"+string(k))
	}
	return device
}

// Overlapping are the names of all devices of a GPU that overlap with some of
// its memory slices, the whole GPU and shares of it included.
func (n *GPUs) Overlapping(t testing.TB, gpu, start, size int) []string {
	t.Helper()
	g := n.Machine(t).GPUs[gpu]
	whole := DeviceName(g.PCIAddress, Place{})
	names := []string{whole, whole + "-" + string(MPS), whole + "-" + string(TimeSlice)}
	for _, p := range g.MIG.Profiles {
		for _, at := range p.Placements {
			if at.Start < start+size && start < at.Start+at.Size {
				names = append(names, DeviceName(g.PCIAddress, Place{Profile: p.Name, Start: at.Start}))
			}
		}
	}
	return names
}

// Place is a partition of a GPU by profile name and start.
type Place struct {
	Profile string
	Start   int
}

// Find returns the live instance of a partition, or nil.
func (at Place) Find(g *machine.GPU) *machine.GPUInstance {
	for i := range g.MIG.Instances {
		in := &g.MIG.Instances[i]
		if profileName(g, in.ProfileID) == at.Profile && in.Placement.Start == at.Start {
			return in
		}
	}
	return nil
}

func profileName(g *machine.GPU, id uint32) string {
	for _, p := range g.MIG.Profiles {
		if p.ID == id {
			return p.Name
		}
	}
	return ""
}

// Places are all live instances of a GPU, in the order of their starts.
func Places(g *machine.GPU) []Place {
	var all []Place
	if g.MIG == nil {
		return nil
	}
	for _, in := range g.MIG.Instances {
		all = append(all, Place{Profile: profileName(g, in.ProfileID), Start: in.Placement.Start})
	}
	slices.SortFunc(all, func(a, b Place) int { return a.Start - b.Start })
	return all
}

// DeviceName returns the name of the published device with this profile ("" for the
// whole GPU) and start on GPU number index, in the order of PCI addresses.
func (n *GPUs) DeviceName(t testing.TB, index int, profile string, start int) string {
	t.Helper()
	return DeviceName(n.Machine(t).GPUs[index].PCIAddress, Place{Profile: profile, Start: start})
}

// DeviceName is the name of the published device.
func DeviceName(pciAddress string, at Place) string {
	name := "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(pciAddress)
	if at.Profile == "" {
		return name
	}
	return name + "-mig-" + ProfileText(at.Profile) + "-" + strconv.Itoa(at.Start)
}

// ProfileText makes "1g24gb-me-all" of "1g.24gb+me.all", and "1g24gb-no-me" of
// "1g.24gb-me".
func ProfileText(profile string) string { return profileText.Replace(profile) }

var profileText = strings.NewReplacer("-", "-no-", "+", "-", ".all", "-all", ".", "")

// Device is a device that a claim is allocated: a GPU, by number in the order of PCI
// addresses; with a profile and a start a partition of it; with a kind a share.
type Device struct {
	GPU     int
	Profile string
	Start   int
	Kind    ShareKind
	// Memory and Percent are the limits of a share.
	Memory  int64
	Percent int
}

// ShareKind is how a device is shared. It is empty for one that a claim has alone.
type ShareKind string

// Kinds of shares.
const (
	MPS       ShareKind = "mps"
	TimeSlice ShareKind = "timeslice"
)

// Partition is a partition of a GPU.
func Partition(gpu int, profile string, start int) Device {
	return Device{GPU: gpu, Profile: profile, Start: start}
}

// Name is the name under which the device is published.
func (d Device) Name(pciAddress string) string {
	name := DeviceName(pciAddress, Place{Profile: d.Profile, Start: d.Start})
	if d.Kind != "" {
		name += "-" + string(d.Kind)
	}
	return name
}

// Shared returns a share of the device.
func (d Device) Shared(k ShareKind) Device {
	d.Kind = k
	return d
}

// TurnMIGOn turns MIG mode on for all GPUs of a machine.
func TurnMIGOn(m *machine.Machine) {
	for i := range m.GPUs {
		m.GPUs[i].MIG.Current, m.GPUs[i].MIG.Pending = true, true
	}
}

// DeviceNames are the names under which the devices are published.
func (n *GPUs) DeviceNames(t testing.TB, devices []Device) []string {
	t.Helper()
	var names []string
	for _, d := range devices {
		names = append(names, d.Name(n.Address(t, d.GPU)))
	}
	return names
}

// Live are all instances as "profile id @ start", sorted.
func (n *GPUs) Live(t testing.TB) []string {
	t.Helper()
	var live []string
	for _, i := range n.Instances(t) {
		live = append(live, strconv.Itoa(int(i.ProfileID))+"@"+strconv.Itoa(i.Placement.Start))
	}
	slices.Sort(live)
	return live
}
