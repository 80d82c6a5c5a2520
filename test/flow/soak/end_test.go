// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/partage-dev/partage/test/flow/harness"
)

// finish ends all troubles and has the kubelet repeat its calls until they
// succeed, with pods for the claims that were held and for some more. Then
// hardware, journal and CDI folder have these claims and nothing else. When they
// are released too, nothing is left.
func (s *soak) finish() error {
	s.ending = true
	if err := errors.Join(s.endTroubles(true), s.killAll(), s.ensureSupervisor(), s.ensureDriver()); err != nil {
		return err
	}
	d := s.drivers[0]
	err := harness.Eventually(s.t.Context(), func() error {
		if !s.wellMPS() {
			return errors.New("MPS does not get well")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("in the end: %w", err)
	}
	if err := s.settleClaims(d); err != nil {
		return err
	}
	for range 2 * len(s.machine.GPUs) {
		if wish := s.pick(); wish != nil {
			if err := s.prepare(d, []*soakClaim{s.claimFor(wish)}); err != nil {
				return fmt.Errorf("in the end: %w", err)
			}
		}
	}
	if err := s.settleClaims(d); err != nil {
		return err
	}
	s.done["claim held to the end"] = len(s.claims)
	ctx := s.t.Context()
	if err := harness.Eventually(ctx, s.checkSame); err != nil {
		return fmt.Errorf("in the end, with %d claims: %w", len(s.claims), err)
	}
	s.endUsers(func(*soakClaim) bool { return true })
	for _, c := range s.claims {
		if err := d.TryUnprepare(ctx, c.Claim, harness.KubeletTimeout); err != nil {
			return fmt.Errorf("release %s in the end: %w", c, err)
		}
	}
	s.claims = nil
	err = harness.Eventually(ctx, func() error { return harness.AsError(s.pristine.Diff(s.n.Snapshot(s.t))) })
	if err != nil {
		return fmt.Errorf("in the end, without claims: %w", err)
	}
	return nil
}

// settleClaims repeats what the kubelet wants until it is done. Nobody asks for
// the claims that were deleted any more.
func (s *soak) settleClaims(d *soakDriver) error {
	ctx := s.t.Context()
	for _, c := range s.claims {
		var err error
		switch {
		case c.held:
			err = harness.Eventually(ctx, func() error {
				_, err := d.TryPrepare(ctx, c.Claim, harness.KubeletTimeout)
				return err
			})
		case !c.deleted:
			err = harness.Eventually(ctx, func() error { return d.TryUnprepare(ctx, c.Claim, harness.KubeletTimeout) })
		}
		if err != nil {
			return fmt.Errorf("in the end, %s: %w", c, err)
		}
	}
	s.claims = slices.DeleteFunc(s.claims, func(c *soakClaim) bool { return !c.held })
	return nil
}

// checkSame fails unless the hardware, the journal and the CDI folder have the
// claims that are held and nothing else.
func (s *soak) checkSame() error {
	if err := s.check(); err != nil {
		return err
	}
	var want []string
	for _, c := range s.claims {
		want = append(want, c.GetUid())
	}
	slices.Sort(want)
	records, err := readRecords(s.n)
	if err != nil {
		return err
	}
	if got := slices.Sorted(maps.Keys(records)); !slices.Equal(got, want) {
		return fmt.Errorf("the journal has %v, want %v", got, want)
	}
	specs, err := specUIDs(s.n)
	if err != nil {
		return err
	}
	if !slices.Equal(specs, want) {
		return fmt.Errorf("the CDI folder has %v, want %v", specs, want)
	}
	if err := s.checkSessions(); err != nil {
		return err
	}
	recorded := map[string]string{}
	for _, r := range records {
		for _, d := range r.Devices {
			if p := d.Partition; p != nil && p.Made != nil {
				recorded[recordedName(&d)] = p.Made.UUID
			}
		}
	}
	if live := partitionsOf(s.n.Machine(s.t)); !maps.Equal(live, recorded) {
		return fmt.Errorf("the machine has %v, the journal %v", live, recorded)
	}
	return nil
}
