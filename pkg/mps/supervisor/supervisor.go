// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// Supervisor runs the sessions of a node. There must be only one per folder, which
// Run makes sure of.
type Supervisor struct {
	options Options
	bootID  string
	node    node
	pods    *endingPods
	// background ends, by stop, what goes on without a caller, and closed the watching of processes.
	background context.Context //nolint:containedctx // it is that of the supervisor, not of a call
	stop       context.CancelFunc
	closed     chan struct{}
	wg         sync.WaitGroup

	mu sync.Mutex
	// sessions are those that somebody has wanted since the start, by ID: names of devices.
	sessions map[string]*session
}

// node is what is the same for all sessions.
type node struct {
	// proc is the procfs, label the SELinux context of what is mounted, empty for none.
	proc, label string
	// tmpfs is how many bytes what is mounted for all sessions together may take.
	tmpfs int64
	// warning is what is wrong while sessions run all the same.
	warning string
}

// New returns a supervisor that adopts the sessions in the folder. It returns at
// once: sessions come back in the background. ctx has the logger; the supervisor
// works until Close.
func New(ctx context.Context, options Options) (*Supervisor, error) {
	options = options.withDefaults()
	if err := os.MkdirAll(options.Dir, folderMode); err != nil {
		return nil, fmt.Errorf("make the folder of MPS sessions: %w", err)
	}
	bootID, err := options.Roots.BootID()
	if err != nil {
		return nil, err
	}
	label, err := options.Roots.FileContext(options.SELinuxContext)
	if err != nil {
		return nil, err
	}
	if label != "" {
		klog.FromContext(ctx).Info("What is mounted for MPS sessions gets an SELinux context", "context", label)
	}
	memory, err := nodeMemory()
	if err != nil {
		return nil, err
	}
	s := &Supervisor{
		options: options, bootID: bootID, closed: make(chan struct{}), sessions: map[string]*session{},
		node: node{proc: options.Roots.Complete().Proc, tmpfs: memory * int64(options.MemoryPercent) / 100, label: label},
	}
	if err := allowOpenFiles(); err != nil {
		klog.FromContext(ctx).Error(err, "MPS may run out of files")
		s.node.warning = err.Error()
	}
	s.background, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.pods = &endingPods{wake: s.wakeAll, options: options, ends: map[types.UID]podend.End{}}
	if err := s.recover(ctx); err != nil {
		return s, err
	}
	// Whatever becomes of the sessions meanwhile.
	s.wg.Go(func() {
		s.each(s.background, options.CheckInterval, "MPS logs grow", func(f folder) error { return f.logs().bound() })
	})
	s.wg.Go(func() {
		s.each(s.background, options.LeftoverInterval, "What ended containers left stays", func(f folder) error { return s.removeLeftover(s.background, f) })
	})
	if options.PodsSocket != "" {
		watcher := podend.Watcher{Socket: options.PodsSocket, Retry: options.PodsRetry}
		s.wg.Go(func() { watcher.Run(s.background, s.pods) })
	}
	return s, nil
}

// Ensure makes a session run with these limits and returns it once clients can
// connect and the limits were read back. If a session's first start fails, or ctx is
// canceled before, nothing is left of it; a session that ran before stays, and is
// retried later.
func (s *Supervisor) Ensure(ctx context.Context, spec mps.Spec) (mps.Status, error) {
	err := spec.Validate()
	if err == nil {
		err = s.folder(spec.ID).check()
	}
	if err != nil {
		return mps.Status{}, err
	}
	sess := s.session(spec.ID) //nolint:contextcheck // it outlives the call
	if err := sess.lock.Acquire(ctx, 1); err != nil {
		return mps.Status{}, fmt.Errorf("session %s is busy: %w", spec.ID, err)
	}
	defer sess.lock.Release(1)
	return sess.ensure(sessionContext(ctx, spec.ID), spec)
}

// Stop ends a session and removes all of it. It succeeds when there is none. If the
// removal fails, it is retried in the background and by the next Stop; if ctx is
// canceled while the session is busy, the session goes on.
func (s *Supervisor) Stop(ctx context.Context, id string) error {
	s.mu.Lock()
	sess := s.sessions[id]
	s.mu.Unlock()
	if sess == nil {
		return nil
	}
	// Nothing should wait for a start that is no longer wanted.
	sess.mu.Lock()
	sess.interrupt()
	sess.mu.Unlock()
	ctx = sessionContext(ctx, id)
	if err := sess.lock.Acquire(ctx, 1); err != nil {
		notify(sess.wake)
		return fmt.Errorf("stop MPS session %s, which is busy: %w", id, err)
	}
	defer sess.lock.Release(1)
	if sess.record.Spec.ID == "" {
		return nil
	}
	if _, err := sess.run(ctx, rules.Removed, nil); err != nil {
		return fmt.Errorf("stop MPS session %s: %w", id, err)
	}
	klog.FromContext(ctx).Info("MPS session stopped")
	return nil
}

// all returns all sessions, ordered by ID.
func (s *Supervisor) all() (all []*session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(s.sessions)) {
		all = append(all, s.sessions[id])
	}
	return all
}

// each does something for the folder of each session now and then, until ctx ends.
func (s *Supervisor) each(ctx context.Context, interval time.Duration, problem string, do func(f folder) error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var last logchange.Problem
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		var errs []error
		for _, sess := range s.all() {
			errs = append(errs, do(sess.folder))
		}
		if ctx.Err() == nil {
			last.Log(ctx, errors.Join(errs...), problem, "")
		}
	}
}

// wakeAll has all sessions observed.
func (s *Supervisor) wakeAll() {
	for _, sess := range s.all() {
		notify(sess.wake)
	}
}

// List returns all sessions, ordered by ID.
func (s *Supervisor) List() (all []mps.Status) {
	for _, sess := range s.all() {
		if status := sess.current(); status.Spec.ID != "" {
			all = append(all, status)
		}
	}
	return all
}

// Close stops all daemons and keeps what the next supervisor needs to start them
// again. It is called once, when no other call is in progress.
func (s *Supervisor) Close(ctx context.Context) error {
	defer close(s.closed)
	s.stop()
	s.wg.Wait()
	sessions := s.all()
	errs := make([]error, len(sessions))
	var wg sync.WaitGroup
	for i, sess := range sessions {
		wg.Go(func() {
			ctx := sessionContext(ctx, sess.folder.id())
			if errs[i] = sess.lock.Acquire(ctx, 1); errs[i] != nil {
				return
			}
			defer sess.lock.Release(1)
			if sess.record.Spec.ID != "" {
				_, errs[i] = sess.run(ctx, sess.goal(rules.Suspended), nil)
			} else {
				errs[i] = sess.folder.unmount(false) // what somebody keeps
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (s *Supervisor) folder(id string) folder { return folder(filepath.Join(s.options.Dir, id)) }

// session returns the session with this ID, which may not exist any more, or yet.
func (s *Supervisor) session(id string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sess := s.sessions[id]; sess != nil {
		return sess
	}
	wake, f := make(chan struct{}, 1), s.folder(id)
	sess := &session{
		options: s.options, folder: f, node: s.node, pods: s.pods,
		lock: semaphore.NewWeighted(1), wake: wake, record: rules.Record{BootID: s.bootID},
		daemon: daemon{options: s.options, folder: f, ended: wake, unwatched: s.closed},
		watch:  watch{ended: wake}, interrupt: func() {},
	}
	sess.watch.forget()
	s.sessions[id] = sess
	s.wg.Go(func() { sess.monitor(sessionContext(s.background, id)) })
	return sess
}

func sessionContext(ctx context.Context, id string) context.Context {
	return klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "session", id))
}
