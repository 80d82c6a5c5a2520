// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// sessionsTime bounds the question which MPS sessions there are. It goes to a
// process on this machine.
const sessionsTime = 2 * time.Second

// sessions are those that have devices, which one that is being removed may not. The
// error wraps sharing.ErrNoSupervisor when nobody answers.
func (m *Manager) sessions(ctx context.Context) (map[string]mps.Status, error) {
	limited, cancel := context.WithTimeout(ctx, sessionsTime)
	defer cancel()
	found, err := m.sharing.Sessions(limited)
	if err != nil {
		if limited.Err() != nil && ctx.Err() == nil && !errors.Is(err, sharing.ErrNoSupervisor) {
			err = fmt.Errorf("%w within %s: %w", sharing.ErrNoSupervisor, sessionsTime, err)
		}
		return nil, err
	}
	maps.DeleteFunc(found, func(_ string, s mps.Status) bool { return len(s.Spec.Devices) == 0 })
	return found, nil
}

// observed are the sessions at one moment, or why they are not known.
type observed struct {
	// before are the records as they were before that moment.
	before   []*Record
	sessions map[string]mps.Status
	err      error
}

// observeSessions looks at the journal first.
func (m *Manager) observeSessions(ctx context.Context) (observed, error) {
	var seen observed
	var err error
	if seen.before, _, err = m.journal.list(); err != nil {
		return seen, err
	}
	seen.sessions, seen.err = m.sessions(ctx)
	return seen, nil
}

// gone tells whether a session of a prepared claim did not exist at that moment.
// Another claim may have made it again since.
func (o observed) gone(r *Record, s *SessionRecord) bool {
	if _, runs := o.sessions[s.ID]; runs || o.err != nil {
		return false
	}
	return slices.ContainsFunc(o.before, func(was *Record) bool {
		earlier := was.session(s.ID)
		return was.Claim.UID == r.Claim.UID && was.BootID == r.BootID && was.State == Prepared && earlier != nil && earlier.live()
	})
}

// servers are the processes that hold a claim's devices on behalf of MPS clients.
// They are no users.
func (m *Manager) servers(ctx context.Context, r *Record) ([]int, error) {
	if len(r.Sessions) == 0 {
		return nil, nil
	}
	sessions, err := m.sessions(ctx)
	if errors.Is(err, sharing.ErrNoSupervisor) {
		// What still holds the device then counts as a user.
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, s := range r.Sessions {
		pids = append(pids, sessions[s.ID].Servers...)
	}
	return pids, nil
}

// tend brings the sessions of a prepared claim to what they have to be, and tells
// people when its processes have lost their server. The caller holds the claim's
// lock. What was seen may be older than the claim: it is a reason to look again.
func (m *Manager) tend(ctx context.Context, r *Record, seen observed) error {
	well := true
	for i := range r.Sessions {
		s := &r.Sessions[i]
		status, runs := seen.sessions[s.ID]
		well = well && s.live() && runs && status.Losses == s.Losses
	}
	if well || seen.sessions == nil {
		return nil // or it is not known, see unchecked
	}
	before := r.clone()
	if _, err := m.noteLosses(ctx, r, seen); err != nil {
		return err
	}
	var errs []error
	for i := range r.Sessions {
		if s := &r.Sessions[i]; !s.live() {
			errs = append(errs, m.revive(ctx, r, s))
		}
	}
	if !r.sameResult(before) {
		errs = append(errs, m.journal.save(r))
	}
	return errors.Join(errs...)
}

// unchecked stands for all claims whose sessions were not seen, with one reason.
func (o observed) unchecked(boot string) error {
	needed := slices.ContainsFunc(o.before, func(r *Record) bool { return r.BootID == boot && len(r.Sessions) > 0 })
	if o.err == nil || !needed {
		return nil
	}
	return fmt.Errorf("the MPS sessions of claims are not checked: %w", supervisorHint(o.err))
}

// noteLosses tells people when the clients of a prepared claim have lost their
// server since they were told last, and returns whether it has. The record is the
// caller's to write. A session of which it was told that it is gone is not live.
func (m *Manager) noteLosses(ctx context.Context, r *Record, seen observed) (told bool, err error) {
	if len(r.Sessions) == 0 {
		return false, nil
	}
	sessions, err := m.sessions(ctx)
	if err != nil {
		return false, supervisorHint(err)
	}
	for i := range r.Sessions {
		s := &r.Sessions[i]
		status, runs := sessions[s.ID]
		runs = runs && !seen.gone(r, s)
		if !s.live() || runs && status.Losses == s.Losses {
			continue
		}
		why := status.LastLoss
		switch {
		case !runs:
			why, status.Losses, s.PipeDir, s.ShmDir = "it was gone", 0, "", ""
		case status.Losses < s.Losses:
			why = "it was gone and was started again"
		}
		s.Losses, told = status.Losses, true
		m.news.again(ctx, r.Claim, ReasonMPSLost, fmt.Sprintf(
			"The claim %s: its processes have lost the MPS server of device %s: %s. Those that used it have failed; restart them.",
			r.Claim, s.Devices[0].Device, why))
	}
	return told, nil
}

// revive starts a session that a prepared claim has and that does not exist.
func (m *Manager) revive(ctx context.Context, r *Record, s *SessionRecord) error {
	unlock, err := m.lockSoon(ctx, s.pciAddresses())
	if err != nil {
		return err
	}
	defer unlock()
	others, err := m.neighbours(r)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting an MPS session that a claim has and that is gone", "session", s.ID)
	return m.startSession(ctx, r, s, others, true)
}
