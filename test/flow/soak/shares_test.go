// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"slices"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// soakClients is how many claims can share a device.
const soakClients = 4

// sharedProfile is the one whose partitions are shared: the smallest.
func sharedProfile(m *machine.Machine) string {
	for i := range m.GPUs {
		if mig := m.GPUs[i].MIG; mig != nil {
			return slices.MinFunc(mig.Profiles, func(a, b machine.GIProfile) int { return a.Slices - b.Slices }).Name
		}
	}
	return ""
}

// soakPolicy offers everything, and shares of some partitions.
func soakPolicy(m *machine.Machine) string {
	text := fmt.Sprintf("default:\n  mps: {clients: %d}\n  timeslice: {clients: %d, interval: Long}\n  mig:\n    variants: true\n", soakClients, soakClients)
	if profile := sharedProfile(m); profile != "" {
		text += fmt.Sprintf("    shares:\n    - profiles: [%s]\n      mps: {clients: %d}\n      timeslice: {clients: %d}\n",
			profile, soakClients, soakClients)
	}
	return text
}

// randomShare makes a share of a device in most of n cases.
func (s *soak) randomShare(r harness.Device, n int) harness.Device {
	switch {
	case s.chance(n):
	case s.chance(2):
		r = r.Shared(harness.MPS)
		r.Memory, r.Percent = int64(1+s.IntN(2))<<30, 10*(1+s.IntN(2))
	default:
		r = r.Shared(harness.TimeSlice)
	}
	return r
}

// randomConfig is one that fits the devices of a claim.
func (s *soak) randomConfig(devices []harness.Device) harness.Config {
	is := func(fits func(harness.Device) bool) bool {
		return !slices.ContainsFunc(devices, func(r harness.Device) bool { return r.Kind != "" || !fits(r) })
	}
	switch {
	case !s.chance(3):
	case is(func(r harness.Device) bool { return r.Profile == "" }):
		return []harness.Config{harness.GPUWithMPS, harness.GPUWithShortSlice}[s.IntN(2)]
	case is(func(r harness.Device) bool { return r.Profile != "" }):
		return harness.PartitionWithMPS
	}
	return ""
}

// sameShare reports whether two are shares of the same device, in the same way.
func sameShare(a, b harness.Device) bool {
	return a.Kind != "" && a.Kind == b.Kind && a.GPU == b.GPU && a.Profile == b.Profile && a.Start == b.Start
}

// sharedOnce has each shared device once. There may be too many shares of one.
func sharedOnce(devices []harness.Device) (once []harness.Device, room bool) {
	counts := make([]int, len(devices))
	for _, d := range devices {
		at := slices.IndexFunc(once, func(other harness.Device) bool { return sameShare(d, other) })
		if at < 0 {
			at = len(once)
			once = append(once, d)
		}
		if counts[at]++; counts[at] > soakClients {
			return nil, false
		}
	}
	return once, true
}
