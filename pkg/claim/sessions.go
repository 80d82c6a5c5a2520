// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/mps"
)

// sessions tells people what has become of the MPS sessions of prepared claims, once, and notes that it has.
type sessions struct {
	store  *record.Store
	list   func(ctx context.Context) (map[string]mps.Status, error)
	events Events
}

// listTime bounds the question which sessions there are. It goes to a process on this machine.
const listTime = 2 * time.Second

// tellLosses does so for claims, as their records have just been read: a session of one that was prepared by then is there.
func (s *sessions) tellLosses(ctx context.Context, records ...*record.Record) error {
	before := slices.DeleteFunc(slices.Clone(records), func(r *record.Record) bool {
		return r.State != record.Prepared || len(r.Sessions) == 0
	})
	if len(before) == 0 {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	found, err := s.list(limited)
	if err != nil {
		return fmt.Errorf("the MPS sessions of claims are not checked: %w", err)
	}
	var errs []error
	for _, r := range before {
		errs = append(errs, s.compare(ctx, r, found))
	}
	return errors.Join(errs...)
}

// compare tells what is news about the sessions of a record, and writes it down.
func (s *sessions) compare(ctx context.Context, r *record.Record, found map[string]mps.Status) error {
	if !slices.ContainsFunc(r.Sessions, func(one record.Session) bool { return changed(&one, found) }) {
		return nil
	}
	var news []news
	err := s.store.Update(r.Claim.UID, func(now *record.Record) error {
		if now.State != record.Prepared || now.Arrived != r.Arrived {
			return nil // it was prepared again since
		}
		for i := range now.Sessions {
			one := &now.Sessions[i]
			if was := r.Session(one.ID); was != nil && isSame(was, one) {
				news = append(news, note(one, found)...)
			}
		}
		return nil
	})
	for _, n := range news {
		s.events.Warn(ctx, r.Claim, n.reason, n.message) // again if it could not be noted that people know
	}
	if errors.Is(err, record.ErrNoRecord) {
		return nil
	}
	return err
}

// news is an event about a session.
type news struct{ reason, message string }

// isSame reports whether nobody has noted anything since.
func isSame(a, b *record.Session) bool {
	return a.PipeDir == b.PipeDir && a.Losses == b.Losses && a.Kills == b.Kills
}

func changed(s *record.Session, found map[string]mps.Status) bool {
	status, runs := found[s.ID]
	return s.Running() && (!runs || status.Losses != s.Losses || status.Kills != s.Kills)
}

// note says what has become of a session, and writes it into its record.
func note(one *record.Session, found map[string]mps.Status) (all []news) {
	if !changed(one, found) {
		return nil
	}
	status, runs := found[one.ID]
	device := one.Devices[0].Device
	if runs && status.Kills > one.Kills {
		all = append(all, news{ReasonMPSClientKilled, fmt.Sprintf(
			"Device %s: %s. NVIDIA calls the state of an MPS server undefined after that: the processes that share it may hang, fail "+
				"or get wrong results. It is replaced when all of them have ended. To be safe, restart them.", device, status.LastKill)})
	}
	one.Kills = status.Kills
	if runs && status.Losses == one.Losses {
		return all
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
		one.PipeDir, one.ShmDir, one.Losses, one.Kills = "", "", 0, 0
	}
	return append(all, news{ReasonMPSLost, fmt.Sprintf(
		"Device %s: processes have lost their MPS server: %s. Those that used it have failed. "+
			"Containers that have not ended because of that must be restarted: delete their pods.", device, why)})
}
