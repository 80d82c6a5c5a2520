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
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/mps"
)

// Supervisor runs the sessions of a node. There must be only one per folder, which
// Run makes sure of.
type Supervisor struct {
	options Options
	bootID  string
	memory  *memory
	// fewFiles is logged when it changes, not for each session.
	fewFiles logchange.Problem
	// closing ends the monitors of sessions, closed the watching of processes.
	closing, closed chan struct{}
	wg              sync.WaitGroup

	mu       sync.Mutex
	sessions map[string]*session
}

// New returns a supervisor that adopts the sessions in the folder. It returns at
// once: sessions come back in the background. ctx has the logger; the supervisor
// works until Close.
func New(ctx context.Context, options Options) (*Supervisor, error) {
	options = options.withDefaults()
	if !filepath.IsAbs(options.Dir) {
		return nil, fmt.Errorf("the folder of MPS sessions is %q: want an absolute path", options.Dir)
	}
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
	// Servers outlive a daemon that is killed. As children of this process they can
	// be reaped.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become the subreaper of MPS servers: %w", err)
	}
	s := &Supervisor{
		options: options, bootID: bootID, memory: &memory{dir: options.Dir, proc: options.Roots.Complete().Proc, percent: options.MemoryPercent, label: label},
		closing: make(chan struct{}), closed: make(chan struct{}),
		sessions: map[string]*session{},
	}
	if err := host.RemoveAside(ctx, options.Dir); err != nil {
		klog.FromContext(ctx).Error(err, "What is left of earlier MPS sessions stays for now")
	}
	if err := s.recover(ctx); err != nil {
		return s, err
	}
	s.wg.Go(func() { s.boundLogs(ctx) })
	s.wg.Go(func() { s.removeLeftovers(ctx) })
	if options.PodsSocket != "" {
		s.wg.Go(func() { s.watchPods(ctx) })
	}
	return s, nil
}

// Ensure makes a session run with these limits and returns it once clients can
// connect and the limits were read back. If a session's first start fails, or ctx is
// canceled before, nothing is left of it; a session that ran before stays, and is
// retried later.
func (s *Supervisor) Ensure(ctx context.Context, spec mps.Spec) (mps.Status, error) {
	spec = spec.Clone()
	err := spec.Validate()
	if err == nil {
		err = s.folder(spec.ID).check()
	}
	if err != nil {
		return mps.Status{}, err
	}
	for {
		sess, err := s.locked(ctx, spec.ID)
		if err != nil {
			return mps.Status{}, err
		}
		if sess == nil {
			continue // it was removed meanwhile
		}
		status, err := s.ensure(ctx, sess, spec)
		sess.unlock()
		if !errors.Is(err, errRemoved) {
			return status, err
		}
	}
}

// errRemoved: the session that was being removed is gone, and there can be another.
var errRemoved = errors.New("removed")

func (s *Supervisor) ensure(ctx context.Context, sess *session, spec mps.Spec) (mps.Status, error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "session", spec.ID)
	ctx, cancel := context.WithTimeoutCause(klog.NewContext(ctx, logger), s.options.StartLimit, errTooSlow)
	defer cancel()
	record := &sess.daemon.record
	if record.Removing {
		if err := sess.daemon.remove(ctx); err != nil {
			s.startMonitor(ctx, sess, s.options.CheckInterval)
			return mps.Status{}, fmt.Errorf("an earlier session %s must be removed first: %w", spec.ID, err)
		}
		s.forget(sess)
		return mps.Status{}, errRemoved
	}
	if !record.Started {
		return s.create(ctx, sess, spec)
	}
	if err := record.Spec.CheckChange(spec); err != nil {
		return mps.Status{}, err
	}
	sess.repair.backoff.urgent = true
	defer func() { sess.repair.backoff.urgent = false }()
	if err := sess.repair.repair(ctx, spec); err != nil {
		return mps.Status{}, fmt.Errorf("session %s: %w", spec.ID, err)
	}
	status := sess.daemon.status.get()
	if status.Phase == mps.Faulted {
		return mps.Status{}, fmt.Errorf("%w: %s", mps.ErrFaulted, status.Message)
	}
	return status, nil
}

// create starts a session that never ran, completely or not at all.
func (s *Supervisor) create(ctx context.Context, sess *session, spec mps.Spec) (mps.Status, error) {
	began, d := time.Now(), sess.daemon
	d.record = record{BootID: s.bootID, Spec: spec}
	d.publish(mps.Starting, "")
	err := d.start(ctx)
	if err == nil {
		klog.FromContext(ctx).Info("MPS session started", "devices", spec.Devices, "percentage", spec.ThreadPercentage,
			"memory", spec.Memory, "multiUser", spec.MultiUser, "daemon", d.process.PID, "took", time.Since(began).Round(time.Millisecond))
		s.startMonitor(ctx, sess, s.options.CheckInterval)
		return d.status.get(), nil
	}
	err = fmt.Errorf("start MPS session %s on %s: %w", spec.ID, strings.Join(spec.Devices, ", "), err)
	d.record.Removing = true
	// Even if the caller is gone.
	if removeErr := d.remove(context.WithoutCancel(ctx)); removeErr != nil {
		s.startMonitor(ctx, sess, s.options.CheckInterval)
		return mps.Status{}, errors.Join(err, removeErr)
	}
	s.forget(sess)
	return mps.Status{}, err
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
	sess.interrupt()
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "session", id))
	if err := sess.lock(ctx); err != nil {
		s.startMonitor(ctx, sess, 0)
		return fmt.Errorf("stop MPS session %s, which is busy: %w", id, err)
	}
	defer sess.unlock()
	if sess.gone {
		return nil
	}
	if err := sess.daemon.remove(ctx); err != nil {
		s.startMonitor(ctx, sess, s.options.CheckInterval)
		return fmt.Errorf("stop MPS session %s: %w", id, err)
	}
	s.forget(sess)
	klog.FromContext(ctx).Info("MPS session stopped")
	return nil
}

// ids returns those of all sessions.
func (s *Supervisor) ids() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.sessions))
}

// all returns all sessions.
func (s *Supervisor) all() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.sessions))
}

// List returns all sessions, ordered by ID.
func (s *Supervisor) List() []mps.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []mps.Status
	for _, id := range slices.Sorted(maps.Keys(s.sessions)) {
		if status := s.sessions[id].daemon.status.get(); status.Spec.ID != "" {
			all = append(all, status)
		}
	}
	return all
}

// Close stops all daemons and keeps what the next supervisor needs to start them
// again. It is called once, when no other call is in progress.
func (s *Supervisor) Close(ctx context.Context) error {
	defer close(s.closed)
	close(s.closing)
	s.wg.Wait()
	s.mu.Lock()
	sessions := slices.Collect(maps.Values(s.sessions))
	s.mu.Unlock()
	errs := make([]error, len(sessions))
	var wg sync.WaitGroup
	for i, sess := range sessions {
		wg.Go(func() {
			ctx := klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "session", sess.id))
			if errs[i] = sess.lock(ctx); errs[i] != nil {
				return
			}
			defer sess.unlock()
			if !sess.gone {
				errs[i] = sess.daemon.suspend(ctx)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (s *Supervisor) folder(id string) folder { return folder(filepath.Join(s.options.Dir, id)) }

func (s *Supervisor) newSession(id string) *session {
	d := &daemon{options: s.options, memory: s.memory, fewFiles: &s.fewFiles, folder: s.folder(id), serverEnded: make(chan struct{}, 1), clientKilled: make(chan struct{}, 1), unwatched: s.closed}
	return &session{
		id: id, locked: make(chan struct{}, 1), changed: make(chan struct{}, 1),
		daemon: d,
		repair: &repairer{daemon: d, backoff: backoff{first: s.options.FirstPause, longest: s.options.LongestPause}},
	}
}

// locked returns the session with this ID, locked. It makes one if there is none, and
// returns nil if the session was removed while this waited for its lock.
func (s *Supervisor) locked(ctx context.Context, id string) (*session, error) {
	s.mu.Lock()
	sess := s.sessions[id]
	if sess == nil {
		sess = s.newSession(id)
		s.sessions[id] = sess
	}
	s.mu.Unlock()
	if err := sess.lock(ctx); err != nil {
		return nil, fmt.Errorf("session %s is busy: %w", id, err)
	}
	if sess.gone {
		sess.unlock()
		return nil, nil //nolint:nilnil // as said
	}
	return sess, nil
}

// forget removes a session from the list. The caller has its lock.
func (s *Supervisor) forget(sess *session) {
	sess.interrupt()
	sess.gone = true
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, sess.id)
}
