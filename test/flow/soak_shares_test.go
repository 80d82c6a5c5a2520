// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"slices"

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
	text := fmt.Sprintf("default:\n  mps: {clients: %d}\n  timeslice: {clients: %d, interval: Long}\n", soakClients, soakClients)
	if profile := sharedProfile(m); profile != "" {
		text += fmt.Sprintf("  mig:\n    shares:\n    - profiles: [%s]\n      mps: {clients: %d}\n      timeslice: {clients: %d}\n",
			profile, soakClients, soakClients)
	}
	return text
}

// randomShare makes a share of a device in most of n cases.
func (s *soak) randomShare(r request, n int) request {
	switch {
	case s.chance(n):
	case s.chance(2):
		r = r.shared(asMPS)
		r.memory, r.percent = int64(1+s.IntN(2))<<30, 10*(1+s.IntN(2))
	default:
		r = r.shared(asTimeSlice)
	}
	return r
}

// randomConfig is one that fits the devices of a claim.
func (s *soak) randomConfig(devices []request) config {
	is := func(fits func(request) bool) bool {
		return !slices.ContainsFunc(devices, func(r request) bool { return r.kind != "" || !fits(r) })
	}
	switch {
	case !s.chance(3):
	case is(func(r request) bool { return r.profile == "" }):
		return []config{gpuMPS, gpuShort}[s.IntN(2)]
	case is(func(r request) bool { return r.profile != "" }):
		return migMPS
	}
	return ""
}

// sameShare tells whether two are shares of the same device, in the same way.
func sameShare(a, b request) bool {
	return a.kind != "" && a.kind == b.kind && a.gpu == b.gpu && a.profile == b.profile && a.start == b.start
}

// sharedOnce has each shared device once. There may be too many shares of one.
func sharedOnce(devices []request) (once []request, room bool) {
	counts := make([]int, len(devices))
	for _, d := range devices {
		at := slices.IndexFunc(once, func(other request) bool { return sameShare(d, other) })
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

// usesMPS tells whether a device of the claim is used through MPS.
func (w wish) usesMPS(d request) bool {
	return d.kind == asMPS || d.kind == "" && (w.config == gpuMPS || w.config == migMPS)
}

// slice is the time slice that a device of the claim has.
func (w wish) slice(d request) int {
	switch {
	case d.profile != "":
	case w.config == gpuShort:
		return shortSlice
	case d.kind == asTimeSlice:
		return longSlice
	}
	return defaultSlice
}

// checkModes fails unless a device that is there has the compute mode and the time
// slice that a claim's containers need.
func checkModes(w wish, d request, g *machine.GPU) error {
	want, got := defaultMode, g.ComputeMode
	if w.usesMPS(d) {
		want = exclusiveProcess
	}
	if d.profile != "" {
		in := (place{d.profile, d.start}).find(g)
		if in == nil || len(in.Compute) != 1 {
			return fmt.Errorf("its instance is %+v", in)
		}
		got = in.Compute[0].ComputeMode
	}
	if got != want {
		return fmt.Errorf("its compute mode is %d, want %d", got, want)
	}
	if want := w.slice(d); g.TimeSlice != want {
		return fmt.Errorf("the GPU's time slice is %d, want %d", g.TimeSlice, want)
	}
	return nil
}
