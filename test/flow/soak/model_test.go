// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"slices"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// soakClaim is a claim and what the kubelet knows of it.
type soakClaim struct {
	*drapb.Claim
	harness.ClaimSpec
	// held: it was prepared and nothing has happened since that would end that.
	held bool
	// empty: it has nothing, because the driver has said so without any trouble.
	// A claim that is neither may have anything.
	empty bool
	// deleted: the API server does not have it any more.
	deleted bool
	// ids are the CDI ids that it had when it was last prepared.
	ids []string
}

func (c *soakClaim) String() string {
	text := fmt.Sprintf("%s (%s) with %v", c.GetName(), c.GetUid(), c.Devices)
	switch c.Config {
	case harness.GPUWithMPS, harness.PartitionWithMPS:
		text += " and MPS"
	case harness.GPUWithShortSlice:
		text += " and an interval"
	}
	return text
}

// pick chooses one or two devices. Mostly they are free, as those that the
// scheduler chooses; nil says that none was found.
func (s *soak) pick() *harness.ClaimSpec {
	for range 8 {
		w := &harness.ClaimSpec{Devices: []harness.Device{s.randomDevice()}}
		if other := s.randomDevice(); s.chance(4) && !s.overlap(w.Devices[0], other) && !sameShare(w.Devices[0], other) {
			w.Devices = append(w.Devices, other)
		}
		w.Config = s.randomConfig(w.Devices)
		if s.chance(12) || s.fit([]*soakClaim{{ClaimSpec: *w}}) {
			return w
		}
	}
	return nil
}

func (s *soak) claimFor(w *harness.ClaimSpec) *soakClaim {
	var configs []harness.Config
	if w.Config != "" {
		configs = append(configs, w.Config)
	}
	c := &soakClaim{Claim: s.n.Allocate(s.t, w.Devices, configs...), ClaimSpec: *w, empty: true}
	s.claims = append(s.claims, c)
	return c
}

// randomDevice chooses among those that the machine can have in its mode.
func (s *soak) randomDevice() harness.Device {
	r := harness.Device{GPU: s.IntN(len(s.machine.GPUs))}
	mig := s.machine.GPUs[r.GPU].MIG
	if mig == nil || mig.ResetToSwitch && !mig.Current || !mig.ResetToSwitch && s.chance(3) {
		return s.randomShare(r, 2)
	}
	p := mig.Profiles[s.IntN(len(mig.Profiles))]
	r.Profile, r.Start = p.Name, p.Placements[s.IntN(len(p.Placements))].Start
	if p.Name == sharedProfile(s.machine) {
		return s.randomShare(r, 2)
	}
	return r
}

// instance is the GPU instance that a device has or would have; nil for a whole
// GPU.
func (s *soak) instance(r harness.Device) *catalog.Instance {
	if r.Profile == "" {
		return nil
	}
	for _, p := range s.machine.GPUs[r.GPU].MIG.Profiles {
		for _, at := range p.Placements {
			if p.Name == r.Profile && at.Start == r.Start {
				return &catalog.Instance{ProfileID: p.ID, Placement: at}
			}
		}
	}
	return nil
}

// overlap reports whether two devices exclude each other.
func (s *soak) overlap(a, b harness.Device) bool {
	if a.GPU != b.GPU || sameShare(a, b) {
		return false
	}
	x, y := s.instance(a), s.instance(b)
	if x == nil || y == nil {
		return true
	}
	return x.Placement.Start < y.Placement.Start+y.Placement.Size && y.Placement.Start < x.Placement.Start+x.Placement.Size
}

// checkOverlap fails if two claims hold the same part of a GPU.
func (s *soak) checkOverlap() error {
	var held []*soakClaim
	for _, c := range s.claims {
		if !c.held {
			continue
		}
		for _, other := range held {
			for _, a := range c.Devices {
				if slices.ContainsFunc(other.Devices, func(b harness.Device) bool { return s.overlap(a, b) }) {
					return fmt.Errorf("claims %s and %s are both prepared", c, other)
				}
			}
		}
		held = append(held, c)
	}
	return nil
}

// fit reports whether the machine has room for these claims beside those that are
// held, and nothing else is in the way.
func (s *soak) fit(claims []*soakClaim) bool {
	devices := map[int][]harness.Device{}
	for _, c := range claims {
		for _, d := range c.Devices {
			devices[d.GPU] = append(devices[d.GPU], d)
		}
	}
	for _, c := range s.claims {
		if slices.Contains(claims, c) || c.empty {
			continue
		}
		for _, d := range c.Devices {
			if len(devices[d.GPU]) == 0 {
				continue
			}
			if !c.held {
				return false // it is not known what it has
			}
			devices[d.GPU] = append(devices[d.GPU], d)
		}
	}
	for gpu, all := range devices {
		if !s.roomFor(gpu, all) {
			return false
		}
	}
	return true
}

// roomFor reports whether a GPU has room for all of these devices at once.
func (s *soak) roomFor(gpu int, devices []harness.Device) bool {
	devices, room := sharedOnce(devices)
	if !room {
		return false
	}
	var layout catalog.Layout
	for _, d := range devices {
		instance := s.instance(d)
		if instance == nil {
			return len(devices) == 1
		}
		layout = append(layout, *instance)
	}
	return catalog.Legal(&s.machine.GPUs[gpu], layout) == nil
}

// some chooses up to n claims that fit a condition, in random order.
func (s *soak) some(n int, fits func(*soakClaim) bool) []*soakClaim {
	var found []*soakClaim
	for _, i := range s.Perm(len(s.claims)) {
		if c := s.claims[i]; len(found) < n && fits(c) {
			found = append(found, c)
		}
	}
	return found
}

// forget drops claims that the kubelet is done with. Most go from the API server
// then.
func (s *soak) forget(claims []*soakClaim) {
	for _, c := range claims {
		s.n.API.DeleteClaim(c.GetNamespace(), c.GetName())
	}
	s.claims = slices.DeleteFunc(s.claims, func(c *soakClaim) bool { return slices.Contains(claims, c) })
}

// checkHeld fails unless a claim has on the hardware, in its CDI spec and in the
// journal what it needs.
func (s *soak) checkHeld(c *soakClaim, m *machine.Machine, all soakRecords) error {
	record := all[c.GetUid()]
	if record == nil || record.State != harness.StatePrepared || record.BootID != m.BootID || len(record.Devices) != len(c.Devices) {
		return fmt.Errorf("claim %s: the journal says %+v", c, record)
	}
	if len(c.ids) != len(c.Devices) {
		return fmt.Errorf("claim %s has the CDI ids %v", c, c.ids)
	}
	for i, d := range c.Devices {
		if err := s.n.CheckDevice(c.GetUid(), c.ids[i], d, &m.GPUs[d.GPU]); err != nil {
			return fmt.Errorf("claim %s, device %v: %w", c, d, err)
		}
		if err := harness.CheckModes(c.ClaimSpec, d, &m.GPUs[d.GPU]); err != nil {
			return fmt.Errorf("claim %s, device %v: %w", c, d, err)
		}
	}
	return nil
}
