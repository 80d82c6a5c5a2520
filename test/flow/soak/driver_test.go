// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// soakDriver is a running driver.
type soakDriver struct {
	*harness.KillableDriver
	// troubled: it has seen a trouble, or will. Its calls may fail.
	troubled bool
	// doomed: somebody kills it.
	doomed bool
}

// soakFlags make the driver find out soon what happens.
var soakFlags = []string{
	"--poll-interval=100ms", "--claim-check-interval=100ms", "--orphan-grace=200ms", "--nvml-call-limit=10s",
}

// ensureDriver makes sure that a driver runs. The kubelet and the container
// runtime restart one that ends, as often as it takes.
func (s *soak) ensureDriver() error {
	if err := s.reap(); err != nil {
		return err
	}
	for try := 0; len(s.drivers) == 0; try++ {
		if try == 20 {
			s.remember("no driver survives, the troubles end")
			if err := s.endTroubles(true); err != nil {
				return err
			}
		}
		if err := s.startDriver(); err != nil {
			return err
		}
	}
	return nil
}

// startDriver is no failure when the driver is killed while it starts.
func (s *soak) startDriver() error {
	process, err := s.n.Spawn(append(slices.Clip(soakFlags), s.n.Policy(s.t, soakPolicy(s.machine)))...)
	if err != nil {
		return err
	}
	s.done["driver started"]++
	d := &soakDriver{KillableDriver: process, troubled: len(s.troubles) > 0}
	s.drivers = append(s.drivers, d)
	s.keepLog(d.Log)
	if !s.ending && s.chance(6) {
		d.doom(1 + s.IntN(200))
	}
	err = d.Connect(s.t.Context(), s.n.RegistrarDir)
	if err == nil || !d.troubled {
		return err
	}
	select {
	case <-d.Exited:
		return s.reap()
	case <-time.After(harness.Patience):
		return err
	}
}

// keepLog keeps the last logs for the message of a failure.
func (s *soak) keepLog(log *harness.LogBuffer) {
	const enough = 5
	if s.logs = append(s.logs, log); len(s.logs) > enough {
		s.logs = s.logs[1:]
	}
}

// doom kills the driver at an effect.
func (d *soakDriver) doom(n int) {
	d.troubled, d.doomed = true, true
	d.Arm(n)
}

// murder kills the driver now.
func (d *soakDriver) murder() {
	d.troubled, d.doomed = true, true
	d.Kill()
}

func (s *soak) killAll() error {
	for _, d := range s.drivers {
		d.murder()
	}
	return s.reap()
}

// reap forgets the drivers that have ended, which must have had a reason to.
func (s *soak) reap() error {
	var errs []error
	s.drivers = slices.DeleteFunc(s.drivers, func(d *soakDriver) bool {
		select {
		case <-d.Exited:
		default:
			return false
		}
		d.Close()
		status, ok := d.Cmd.ProcessState.Sys().(syscall.WaitStatus)
		switch {
		case !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL || !d.troubled:
			errs = append(errs, fmt.Errorf("a driver ended with %v", d.Cmd.ProcessState))
		case !d.doomed:
			s.done["driver killed by a fault"]++
		}
		return true
	})
	return errors.Join(errs...)
}

func (s *soak) closeDrivers() {
	for _, d := range s.drivers {
		d.Close()
	}
	s.drivers = nil
}

// driver chooses one to call. During an upgrade the kubelet may call either.
func (s *soak) driver() *soakDriver { return s.drivers[s.IntN(len(s.drivers))] }

// calm reports whether a driver has no reason to fail. That another one is in
// trouble may delay it, but must not make it fail.
func (s *soak) calm(d *soakDriver) bool { return len(s.troubles) == 0 && !d.troubled }

// prepare makes one call. Its error is about what must not be.
func (s *soak) prepare(d *soakDriver, claims []*soakClaim) error {
	calm := s.calm(d) && s.wellMPS()
	must := calm && s.fit(claims)
	if must {
		// What is left of claims that nobody asks for any more is in the way.
		left, err := s.strangers(claims)
		if err != nil {
			return err
		}
		must = !left
	}
	request := &drapb.NodePrepareResourcesRequest{}
	for _, c := range claims {
		request.Claims = append(request.Claims, c.Claim)
	}
	limit := harness.KubeletTimeout
	if !must {
		// The driver waits for claims that are in the way, to no avail mostly. An MPS
		// session takes a tenth of a second.
		limit = time.Duration(20+s.IntN(200)) * time.Millisecond
		if s.chance(2) {
			limit *= 4
		}
	}
	call := func() (*drapb.NodePrepareResourcesResponse, error) {
		ctx, cancel := context.WithTimeout(s.t.Context(), limit)
		defer cancel()
		return d.Kubelet.NodePrepareResources(ctx, request)
	}
	response, callErr := call()
	// A call into the library that was merely slow may have been taken for one that
	// hangs. It returns, and then the kubelet's next attempt succeeds.
	for end := time.Now().Add(harness.Patience); must && callErr == nil && anyLeftBehind(response) && time.Now().Before(end); {
		s.done["slow call taken for hung"]++
		response, callErr = call()
	}
	var errs []error
	for _, c := range claims {
		answer := response.GetClaims()[c.GetUid()]
		failure := callErr
		if callErr == nil {
			failure = harness.AsError(answer.GetError())
		}
		s.remember("prepare %s: %v", c, failure)
		if failure != nil {
			if must {
				errs = append(errs, fmt.Errorf("claim %s was refused without a reason: %w", c, failure))
			}
			s.refused(c, callErr, calm)
			continue
		}
		errs = append(errs, s.granted(c, answer))
	}
	return errors.Join(errs...)
}

// anyLeftBehind reports whether a claim was refused because a call into the
// library has not returned within the driver's limit.
func anyLeftBehind(response *drapb.NodePrepareResourcesResponse) bool {
	for _, answer := range response.GetClaims() {
		if harness.IsHung(harness.AsError(answer.GetError())) {
			return true
		}
	}
	return false
}

// refused: a claim that was held stays so, because pods may run on it. One that
// was not has nothing if the driver says so.
func (s *soak) refused(c *soakClaim, callErr error, calm bool) {
	switch status.Code(callErr) {
	case codes.OK:
		s.done["refused"]++
	case codes.DeadlineExceeded:
		s.done["given up by the kubelet"]++
	default:
		s.done["cut off by a crash"]++
	}
	if !c.held {
		c.empty = callErr == nil && calm
	}
}

// granted fails if a claim that was held has other devices now.
func (s *soak) granted(c *soakClaim, answer *drapb.NodePrepareResourceResponse) error {
	s.done["granted"]++
	ids := harness.CDIIDs(answer)
	if c.held && !slices.Equal(ids, c.ids) {
		return fmt.Errorf("claim %s had the CDI ids %v and has %v", c, c.ids, ids)
	}
	c.held, c.empty, c.ids = true, false, ids
	return nil
}

// unprepare makes one call. Its error is about what must not be.
func (s *soak) unprepare(d *soakDriver, claims []*soakClaim) error {
	request := &drapb.NodeUnprepareResourcesRequest{}
	for _, c := range claims {
		request.Claims = append(request.Claims, c.Claim)
		c.held, c.empty = false, false
	}
	s.endUsers(func(c *soakClaim) bool { return slices.Contains(claims, c) })
	ctx, cancel := context.WithTimeout(s.t.Context(), harness.KubeletTimeout)
	defer cancel()
	response, callErr := d.Kubelet.NodeUnprepareResources(ctx, request)
	var errs []error
	var gone []*soakClaim
	for _, c := range claims {
		failure := callErr
		if callErr == nil {
			failure = harness.AsError(response.GetClaims()[c.GetUid()].GetError())
		}
		s.remember("unprepare %s: %v", c, failure)
		switch {
		case failure == nil:
			gone = append(gone, c)
		case s.calm(d) && !harness.IsHung(failure):
			errs = append(errs, fmt.Errorf("claim %s was not released without a reason: %w", c, failure))
		}
	}
	s.forget(gone)
	return errors.Join(errs...)
}

// stopWell ends a driver as the kubelet does.
func (d *soakDriver) stopWell() error {
	if err := d.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	<-d.Exited
	if code := d.Cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("a driver that was told to stop ended with %d", code)
	}
	return nil
}
