// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/claim/survey"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// sessionView is what MPS sessions there were at one moment, or why that is not known.
// It may be older than what it is compared with: it is a reason to look again.
type sessionView struct {
	// before are the records as they were before that moment.
	before   []*journal.Record
	sessions map[string]mps.Status
	err      error
}

// viewSessions reads the journal first.
func (e *engine) viewSessions(ctx context.Context) (sessionView, error) {
	snapshot, err := e.store.Snapshot()
	if err != nil {
		return sessionView{}, err
	}
	seen := sessionView{before: snapshot.Records}
	seen.sessions, seen.err = e.kit.Sessions(ctx)
	return seen, nil
}

// gone reports whether a session of a prepared claim did not exist at that moment.
// Another claim may have made it again since.
func (v sessionView) gone(r *journal.Record, s *journal.Session) bool {
	if _, runs := v.sessions[s.ID]; runs || v.err != nil {
		return false
	}
	return slices.ContainsFunc(v.before, func(was *journal.Record) bool {
		earlier := was.Session(s.ID)
		return was.Claim.UID == r.Claim.UID && was.State == journal.Prepared && earlier != nil && earlier.Running()
	})
}

// unchecked stands for all claims whose sessions were not seen, with one reason.
func (v sessionView) unchecked() error {
	needed := slices.ContainsFunc(v.before, func(r *journal.Record) bool { return len(r.Sessions) > 0 })
	if v.err == nil || !needed {
		return nil
	}
	return fmt.Errorf("the MPS sessions of claims are not checked: %w", step.SupervisorHint(v.err))
}

// repairSessions starts the sessions of a prepared claim that are gone, and tells people
// when its processes have lost their server. The caller holds the claim's lock.
func (e *engine) repairSessions(ctx context.Context, r *journal.Record, seen sessionView) error {
	healthy := true
	for i := range r.Sessions {
		s := &r.Sessions[i]
		status, runs := seen.sessions[s.ID]
		healthy = healthy && s.Running() && runs && status.Losses == s.Losses && status.Kills == s.Kills
	}
	if healthy || seen.sessions == nil {
		return nil // or it is not known, see unchecked
	}
	before := r.Clone()
	if _, err := e.reportLosses(ctx, r, seen); err != nil {
		return err
	}
	var errs []error
	for i := range r.Sessions {
		if s := &r.Sessions[i]; !s.Running() {
			errs = append(errs, e.restartSession(ctx, r, s))
		}
	}
	if !r.SameOutcome(before) {
		errs = append(errs, e.store.Save(r))
	}
	return errors.Join(errs...)
}

// reportLosses tells people when the clients of a prepared claim have lost their
// server since that was reported last, and returns whether it has. The record is the
// caller's to write. A session that was reported to be gone is not running.
func (e *engine) reportLosses(ctx context.Context, r *journal.Record, seen sessionView) (reported bool, err error) {
	if len(r.Sessions) == 0 {
		return false, nil
	}
	sessions, err := e.kit.Sessions(ctx)
	if err != nil {
		return false, step.SupervisorHint(err)
	}
	for i := range r.Sessions {
		s := &r.Sessions[i]
		status, runs := sessions[s.ID]
		runs = runs && !seen.gone(r, s)
		if runs && s.Running() && status.Kills != s.Kills {
			e.reportKill(ctx, r, s, status)
			reported = true
		}
		if !s.Running() || runs && status.Losses == s.Losses {
			continue
		}
		why := status.LastLoss
		switch {
		case !runs:
			why, status.Losses = "it was gone", 0
			s.Stopped()
		case status.Losses < s.Losses:
			why = "it was gone and was started again"
		}
		s.Losses, reported = status.Losses, true
		e.events.always(ctx, r.Claim, ReasonMPSLost, fmt.Sprintf(
			"Device %s: processes have lost their MPS server: %s. Those that used it have failed. "+
				"Containers that have not ended because of that must be restarted: delete their pods.",
			s.Devices[0].Device, why))
	}
	return reported, nil
}

// reportKill tells people that a client of a session was killed. A count that has gone down
// is that of a session that was started again.
func (e *engine) reportKill(ctx context.Context, r *journal.Record, s *journal.Session, status mps.Status) {
	more := status.Kills > s.Kills
	s.Kills = status.Kills
	if !more {
		return
	}
	e.events.always(ctx, r.Claim, ReasonMPSClientKilled, fmt.Sprintf(
		"Device %s: %s. NVIDIA calls the state of an MPS server undefined after that: the processes that share it may hang, fail "+
			"or get wrong results. It is replaced when all of them have ended. To be safe, restart them.",
		s.Devices[0].Device, status.LastKill))
}

// restartSession starts a session that a prepared claim has and that does not exist.
func (e *engine) restartSession(ctx context.Context, r *journal.Record, s *journal.Session) error {
	unlock, err := e.lockSoon(ctx, s.PCIAddresses())
	if err != nil {
		return err
	}
	defer unlock()
	snapshot, err := e.store.Snapshot()
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting an MPS session that a claim has and that is gone", "session", s.ID)
	live, err := e.kit.ConvergeSession(ctx, s, append(snapshot.Others(r.Claim.UID).Holders(), r))
	if err != nil {
		return fmt.Errorf("device %s: %w", s.Devices[0].Device, err)
	}
	if !s.Running() {
		s.Losses, s.Kills = live.Losses, live.Kills
	}
	s.PipeDir, s.ShmDir = live.PipeDir, live.ShmDir
	return nil
}

// reconcileSessions ends the sessions that no record names, and changes the limits of
// those with others than their claims need: a supervisor may have been away when a claim
// was released.
func (c *reconciler) reconcileSessions(ctx context.Context, seen sessionView) error {
	var errs []error
	for id, status := range seen.sessions {
		if err := c.reconcileLimits(ctx, id, status); err != nil {
			errs = append(errs, fmt.Errorf("MPS session %s has other limits than its claims: %w", id, err))
		}
		if err := c.endUnnamed(ctx, id, status); err != nil {
			errs = append(errs, fmt.Errorf("MPS session %s, which no claim has: %w", id, err))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// reconcileLimits gives a session that claims share the limits that they need.
func (c *reconciler) reconcileLimits(ctx context.Context, id string, status mps.Status) error {
	own, holders, err := c.settledHolders(id)
	if err != nil || own == nil || sameLimits(own.Desired(holders), status.Spec) {
		return err
	}
	unlock, err := c.lockSoon(ctx, own.PCIAddresses())
	if err != nil {
		return err
	}
	defer unlock()
	// Claims may have come and gone meanwhile, and have seen to it.
	own, holders, err = c.settledHolders(id)
	if err == nil && own != nil {
		_, err = c.kit.ConvergeSession(ctx, own, holders)
	}
	return err
}

// settledHolders returns a session that claims share, and these claims, if they are all
// prepared: others are about to bring it to what it has to be.
func (c *reconciler) settledHolders(id string) (*journal.Session, []*journal.Record, error) {
	snapshot, err := c.store.Snapshot()
	if err != nil || snapshot.MayHoldSession(id) != "" {
		return nil, nil, err
	}
	holders := snapshot.Holders()
	var own *journal.Session
	for _, r := range holders {
		s := r.Session(id)
		if s == nil || !s.Shared {
			continue
		}
		if r.State != journal.Prepared || !s.Running() {
			return nil, nil, nil
		}
		own = s
	}
	return own, holders, nil
}

func sameLimits(want sharing.Session, is mps.Spec) bool {
	return want.Limits.ThreadPercentage == is.ThreadPercentage && maps.Equal(want.Limits.MemoryBytes, is.Memory) &&
		is.ClientPriority.Serves(mps.ClientPriority(want.ClientPriority))
}

// endUnnamed ends a session that no record names.
func (c *reconciler) endUnnamed(ctx context.Context, id string, status mps.Status) error {
	if named, err := c.isNamed(id); err != nil || named {
		return err
	}
	session, known := survey.ResolveSession(c.inventory.Load(), id, status)
	if !known {
		klog.FromContext(ctx).V(4).Info("An MPS session is not of a device of this node, it is left alone", "session", id)
		return nil
	}
	var gpus []string
	for _, d := range session.Devices {
		gpus = append(gpus, d.PCIAddress)
	}
	unlock, err := c.lockSoon(ctx, gpu.SortPCIAddresses(gpus))
	if err != nil {
		return err
	}
	defer unlock()
	// A claim may have got it meanwhile.
	if named, err := c.isNamed(id); err != nil || named {
		return err
	}
	klog.FromContext(ctx).Info("Ending an MPS session that no claim has", "session", id)
	return c.kit.EndSession(ctx, session)
}

// isNamed reports whether a record names a session. Of records that cannot be read it has
// to be assumed.
func (c *reconciler) isNamed(id string) (bool, error) {
	snapshot, err := c.store.Snapshot()
	if err != nil {
		return false, err
	}
	return snapshot.MayHoldSession(id) != "" || snapshot.NamesSession(id), nil
}
