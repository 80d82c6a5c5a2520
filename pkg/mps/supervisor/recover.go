// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
)

// recover takes over the sessions that an earlier supervisor left. If the record of one
// cannot be read for the moment, it fails before it touches any of them.
func (s *Supervisor) recover(ctx context.Context) error {
	entries, err := os.ReadDir(s.options.Dir)
	if err != nil {
		return fmt.Errorf("find MPS sessions: %w", err)
	}
	records := map[string]rules.Record{}
	for _, entry := range entries {
		id := entry.Name()
		if !entry.IsDir() || !mps.ValidID(id) {
			continue
		}
		ctx := sessionContext(ctx, id)
		if foreign, err := s.folder(id).foreign(); foreign != "" || err != nil {
			klog.FromContext(ctx).Error(err, "Leaving a folder alone that is not an MPS session's", "folder", string(s.folder(id)), "because", foreign)
			continue
		}
		if records[id], err = s.restore(ctx, id); err != nil {
			return err
		}
	}
	for id, r := range records {
		sess := s.session(id) //nolint:contextcheck // it outlives the call
		sess.record, sess.written, sess.pace.Ready = r, r, time.Now()
		sess.publish(mps.Starting, "the MPS supervisor has been restarted", nil)
		notify(sess.wake)
	}
	return nil
}

// restore reads the record of a session. If the session must not go on, it returns a
// record that makes it be removed.
func (s *Supervisor) restore(ctx context.Context, id string) (rules.Record, error) {
	logger := klog.FromContext(ctx)
	unwanted := rules.Record{BootID: s.bootID, Removing: true, Spec: mps.Spec{ID: id}}
	r, err := s.folder(id).load()
	pathError := (*fs.PathError)(nil)
	switch {
	case errors.As(err, &pathError) && !errors.Is(err, fs.ErrNotExist):
		return rules.Record{}, err
	case err != nil:
		logger.Info("Removing what is left of an unknown MPS session", "reason", err)
		return unwanted, nil
	case r.BootID != s.bootID:
		logger.Info("Removing an MPS session of another boot", "bootID", r.BootID)
		return unwanted, nil
	case !r.Started:
		logger.Info("Removing an MPS session whose start was not completed")
		unwanted.Spec = r.Spec
		return unwanted, nil
	case r.Removing:
		logger.Info("Completing the removal of an MPS session")
	default:
		logger.Info("Found an MPS session", "devices", r.Spec.Devices, "losses", r.Losses)
	}
	return r, nil
}
