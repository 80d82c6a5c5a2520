// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/mps"
)

// sessions tells people what has become of the MPS sessions of prepared claims, once, and notes that it has.
type sessions struct {
	store  *record.Store
	list   func(ctx context.Context) (map[string]mps.Status, error)
	events *eventLog
}

// tellAllLosses does so for all claims.
func (s *sessions) tellAllLosses(ctx context.Context) error {
	// The records come first: a session of one that was prepared by then is there.
	var before []*record.Record
	for _, r := range s.store.Snapshot().Records {
		if r.State == record.Prepared && len(r.Sessions) > 0 {
			before = append(before, r)
		}
	}
	if len(before) == 0 {
		return nil
	}
	found, err := s.list(ctx)
	if err != nil {
		return fmt.Errorf("the MPS sessions of claims are not checked: %w", err)
	}
	var errs []error
	for _, r := range before {
		errs = append(errs, s.compare(ctx, r, found))
	}
	return errors.Join(errs...)
}

// tellLosses does so for one claim.
func (s *sessions) tellLosses(ctx context.Context, uid types.UID) error {
	r, err := s.store.Read(uid)
	if err != nil || r == nil || r.State != record.Prepared || len(r.Sessions) == 0 || r.BootID != s.store.Boot() {
		return nil //nolint:nilerr // whoever needs the record says why it cannot be read
	}
	found, err := s.list(ctx)
	if err != nil {
		return err
	}
	return s.compare(ctx, r, found)
}

// compare tells what is news about the sessions of a record, and writes it down.
func (s *sessions) compare(ctx context.Context, r *record.Record, found map[string]mps.Status) error {
	if !slices.ContainsFunc(r.Sessions, func(one record.Session) bool { return changed(&one, found) }) {
		return nil
	}
	err := s.store.Update(r.Claim.UID, func(now *record.Record) error {
		for i := range now.Sessions {
			was := r.Session(now.Sessions[i].ID)
			if one := &now.Sessions[i]; now.State == record.Prepared && was != nil && isSame(was, one) {
				s.note(ctx, r.Claim, one, found)
			}
		}
		return nil
	})
	if errors.Is(err, record.ErrNoRecord) {
		return nil
	}
	return err
}

// isSame reports whether nobody has noted anything since.
func isSame(a, b *record.Session) bool {
	return a.PipeDir == b.PipeDir && a.Losses == b.Losses && a.Kills == b.Kills
}

func changed(s *record.Session, found map[string]mps.Status) bool {
	status, runs := found[s.ID]
	return s.Running() && (!runs || status.Losses != s.Losses || status.Kills != s.Kills)
}

// note tells people what has become of a session, and writes it into its record.
func (s *sessions) note(ctx context.Context, claim Ref, one *record.Session, found map[string]mps.Status) {
	if !changed(one, found) {
		return
	}
	status, runs := found[one.ID]
	device := one.Devices[0].Device
	about := fmt.Sprintf("%s %d %d %t", one.ID, status.Losses, status.Kills, runs)
	if runs && status.Kills > one.Kills {
		s.events.once(ctx, claim, ReasonMPSClientKilled, about, fmt.Sprintf(
			"Device %s: %s. NVIDIA calls the state of an MPS server undefined after that: the processes that share it may hang, fail "+
				"or get wrong results. It is replaced when all of them have ended. To be safe, restart them.", device, status.LastKill))
	}
	one.Kills = status.Kills
	if runs && status.Losses == one.Losses {
		return
	}
	why := status.LastLoss
	switch {
	case !runs:
		why = "it was gone"
	case status.Losses < one.Losses:
		why = "it was gone and was started again"
	}
	one.Losses = status.Losses
	if !runs {
		one.Stopped()
	}
	s.events.once(ctx, claim, ReasonMPSLost, about, fmt.Sprintf(
		"Device %s: processes have lost their MPS server: %s. Those that used it have failed. "+
			"Containers that have not ended because of that must be restarted: delete their pods.", device, why))
}
