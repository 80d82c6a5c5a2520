// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/klog/v2"
)

// remove ends a session and takes away all of it. What an error leaves is found
// again by the next attempt.
func (s *Supervisor) remove(ctx context.Context, sess *session) error {
	sess.record.Removing = true
	if sess.record.Started {
		// Whoever comes after this supervisor is not to start it again. A disk that
		// takes no more is no reason to keep it running.
		if err := sess.save(sess.record); err != nil && !errors.Is(err, os.ErrNotExist) {
			klog.FromContext(ctx).Error(err, "MPS session is removed without a note of it")
		}
	}
	err := s.end(ctx, sess)
	if err == nil {
		err = sess.unmount(ctx, s.options.EndLimit)
	}
	if err == nil {
		err = sess.delete()
	}
	if err != nil {
		err = fmt.Errorf("remove what is left of session %s: %w", sess.id, err)
		sess.show(Failed, err.Error())
	}
	return err
}

// suspend ends what a session runs, so that a later supervisor can start it again.
func (s *Supervisor) suspend(ctx context.Context, sess *session) error {
	if sess.gone {
		return nil
	}
	if sess.record.Removing || !sess.record.Started {
		return s.remove(ctx, sess)
	}
	if err := s.takeOver(ctx, sess); err != nil {
		return err
	}
	if err := s.end(ctx, sess); err != nil {
		return fmt.Errorf("session %s: %w", sess.id, err)
	}
	s.lose(ctx, sess, "the MPS supervisor of the node was stopped, and its daemons with it")
	return errors.Join(sess.save(sess.record), sess.unmount(ctx, s.options.EndLimit))
}

// recover takes over the sessions that an earlier supervisor left.
func (s *Supervisor) recover(ctx context.Context) error {
	entries, err := os.ReadDir(s.options.Dir)
	if err != nil {
		return fmt.Errorf("look for MPS sessions: %w", err)
	}
	for _, entry := range entries {
		id := entry.Name()
		if !entry.IsDir() || !labelSyntax.MatchString(id) {
			continue
		}
		sess := s.newSession(id)
		ctx := klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "session", id))
		if foreign, err := sess.foreign(); foreign != "" || err != nil {
			klog.FromContext(ctx).Error(err, "Leaving a folder alone that is not an MPS session's", "folder", string(sess.folder), "because", foreign)
			continue
		}
		sess.record = s.restore(ctx, sess.folder)
		sess.ready = time.Now()
		s.sessions[id] = sess
		sess.show(Starting, "the MPS supervisor has started anew")
		s.keep(ctx, sess, 0)
	}
	return nil
}

// restore reads what is known of a session. One that is not to go on is to be
// removed.
func (s *Supervisor) restore(ctx context.Context, f folder) record {
	logger := klog.FromContext(ctx)
	unwanted := record{Removing: true, Spec: Spec{ID: f.id()}}
	r, err := f.load()
	switch {
	case err != nil:
		logger.Info("Removing what is left of an MPS session that is not known", "reason", err)
		return unwanted
	case r.BootID != s.bootID:
		logger.Info("Removing an MPS session of another boot", "bootID", r.BootID)
		return unwanted
	case !r.Started:
		logger.Info("Removing an MPS session whose start was not completed")
		// Not its daemon's PID: it is found by the folder's name.
		unwanted.Spec = r.Spec
		return unwanted
	case r.Removing:
		logger.Info("Going on to remove an MPS session")
	default:
		logger.Info("Found an MPS session", "devices", r.Spec.Devices, "losses", r.Losses)
	}
	return r
}
