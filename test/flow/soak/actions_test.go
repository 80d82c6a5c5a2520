// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"time"
)

// prepareNew prepares one to three new claims in one call. They may be in each
// other's way. A node that is full gets room first.
func (s *soak) prepareNew() error {
	var claims []*soakClaim
	for len(claims) == 0 || len(claims) < 3 && s.chance(3) {
		wish := s.pick()
		if wish == nil {
			break
		}
		claims = append(claims, s.claimFor(wish))
	}
	if len(claims) == 0 {
		return s.unprepareSome()
	}
	return s.prepare(s.driver(), claims)
}

// prepareAgain is what the kubelet does after it was restarted, or for another
// pod with the same claim.
func (s *soak) prepareAgain() error {
	claims := s.some(1+s.IntN(2), func(c *soakClaim) bool {
		return !c.deleted && (c.held || s.fit([]*soakClaim{c}) || s.chance(6))
	})
	if len(claims) == 0 {
		return nil
	}
	return s.prepare(s.driver(), claims)
}

// unprepareSome may be about claims that are gone from the API server.
func (s *soak) unprepareSome() error {
	unsure := s.chance(2)
	claims := s.some(1+s.IntN(3), func(c *soakClaim) bool { return !unsure || !c.held })
	if len(claims) == 0 {
		return nil
	}
	return s.unprepare(s.driver(), claims)
}

// deleteClaim takes a claim from the API server. The kubelet has lost its pod
// and may or may not ask for it later.
func (s *soak) deleteClaim() error {
	for _, c := range s.some(1, func(c *soakClaim) bool { return !c.deleted }) {
		s.delete(c)
	}
	return nil
}

func (s *soak) delete(c *soakClaim) {
	s.remember("delete %s", c)
	s.n.API.DeleteClaim(c.GetNamespace(), c.GetName())
	s.endUsers(func(other *soakClaim) bool { return other == c })
	c.deleted, c.held, c.empty = true, false, c.empty && !c.held
}

// replaceClaim deletes a pod by force: a new claim gets the devices while the
// kubelet has yet to release the old one.
func (s *soak) replaceClaim() error {
	held := s.some(1, func(c *soakClaim) bool { return c.held })
	if len(held) == 0 {
		return nil
	}
	s.delete(held[0])
	replacement := []*soakClaim{s.claimFor(&held[0].ClaimSpec)}
	err := s.prepare(s.driver(), replacement)
	if err != nil || s.chance(3) {
		return err
	}
	for _, call := range []func() error{
		s.ensureDriver,
		func() error { return s.unprepare(s.driver(), held) },
		s.ensureDriver,
		func() error { return s.prepare(s.driver(), replacement) },
	} {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

func (s *soak) killDriver() error {
	s.driver().murder()
	return nil
}

// killSoon kills a driver while it is at work, or shortly after.
func (s *soak) killSoon() error {
	d := s.driver()
	d.troubled, d.doomed = true, true
	// A call takes 1 to 20 ms. Nothing depends on what is hit.
	killer := time.AfterFunc(time.Duration(s.IntN(20_000))*time.Microsecond, func() { _ = d.Cmd.Process.Kill() })
	var err error
	if s.chance(2) {
		err = s.prepareNew()
	} else {
		err = s.unprepareSome()
	}
	if killer.Stop() {
		d.Kill()
	}
	<-d.Exited
	return err
}

// killAtEffect kills a driver at one of its next effects.
func (s *soak) killAtEffect() error {
	s.driver().doom(1 + s.IntN(80))
	return nil
}

// stopDriver ends one as the kubelet does. Calls that hang in the NVIDIA driver
// would make that slow.
func (s *soak) stopDriver() error {
	d := s.driver()
	if !s.calm(d) {
		return nil
	}
	d.troubled, d.doomed = true, true
	if err := d.stopWell(); err != nil {
		return err
	}
	s.drivers = removeDriver(s.drivers, d)
	d.Close()
	return nil
}

func removeDriver(all []*soakDriver, gone *soakDriver) []*soakDriver {
	var others []*soakDriver
	for _, d := range all {
		if d != gone {
			others = append(others, d)
		}
	}
	return others
}

// addDriver begins an upgrade. It ends when one of the two is killed or stopped.
func (s *soak) addDriver() error {
	if len(s.drivers) > 1 {
		return nil
	}
	return s.startDriver()
}
