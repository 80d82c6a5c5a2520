// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

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
)

// Options of a Supervisor. Times that are zero have a default.
type Options struct {
	// Dir holds the sessions' folders. Containers mount what is in it, so it must
	// be the path on the host.
	Dir string
	// Roots say where the driver is; nothing else of them is used but the boot id.
	Roots host.Roots
	// CheckInterval is the time between two looks at a session's server. The end of
	// a daemon is noticed at once.
	CheckInterval time.Duration
	// StartLimit is how long a start may take, if nobody has less patience.
	StartLimit time.Duration
	// CommandLimit is how long a daemon may take to answer.
	CommandLimit time.Duration
	// EndLimit is how long each step of an end may take: a daemon that was told to
	// quit, processes that were killed, a mount that is busy.
	EndLimit time.Duration
	// FirstPause follows the second failed start in a row, and doubles up to
	// LongestPause.
	FirstPause, LongestPause time.Duration
}

func (o Options) withDefaults() Options {
	set := func(field *time.Duration, value time.Duration) {
		if *field == 0 {
			*field = value
		}
	}
	set(&o.CheckInterval, 2*time.Second)
	set(&o.StartLimit, time.Minute)
	set(&o.CommandLimit, 5*time.Second)
	set(&o.EndLimit, 5*time.Second)
	set(&o.FirstPause, time.Second)
	set(&o.LongestPause, 30*time.Second)
	return o
}

// Supervisor runs the sessions of a node. There must be only one for a folder; Run
// sees to that.
type Supervisor struct {
	options Options
	bootID  string
	// closing ends the keepers of sessions, closed the watchers of daemons.
	closing, closed chan struct{}
	wg              sync.WaitGroup

	mu       sync.Mutex
	sessions map[string]*session
}

// New takes over what is in the folder and returns at once: sessions come back in
// the background. ctx has the logger; the supervisor works until Close.
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
	// Servers outlive a daemon that is killed. As children of this process they can
	// be collected.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become the parent of processes without one: %w", err)
	}
	s := &Supervisor{
		options: options, bootID: bootID, closing: make(chan struct{}), closed: make(chan struct{}),
		sessions: map[string]*session{},
	}
	return s, s.recover(ctx)
}

// Ensure makes a session run with these limits and returns it once clients can
// connect and the limits were read back. When a session's first start fails, or
// ctx ends before, nothing of it is left; a session that ran before stays, and
// comes back later.
func (s *Supervisor) Ensure(ctx context.Context, spec Spec) (Status, error) {
	spec = spec.clone()
	err := spec.Validate()
	if err == nil {
		err = s.folder(spec.ID).check()
	}
	if err != nil {
		return Status{}, err
	}
	for {
		sess, err := s.claim(ctx, spec.ID)
		if err != nil {
			return Status{}, err
		}
		if sess == nil {
			continue // it was removed meanwhile
		}
		status, err := s.ensure(ctx, sess, spec)
		sess.release()
		if !errors.Is(err, errRemoved) {
			return status, err
		}
	}
}

// errRemoved: a session that was being removed is gone now, and there can be a new
// one.
var errRemoved = errors.New("removed")

func (s *Supervisor) ensure(ctx context.Context, sess *session, spec Spec) (Status, error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "session", spec.ID)
	ctx, cancel := context.WithTimeoutCause(klog.NewContext(ctx, logger), s.options.StartLimit, errTooSlow)
	defer cancel()
	if sess.record.Removing {
		if err := s.remove(ctx, sess); err != nil {
			s.keep(ctx, sess, s.options.CheckInterval)
			return Status{}, fmt.Errorf("an earlier session %s must be removed first: %w", spec.ID, err)
		}
		s.forget(sess)
		return Status{}, errRemoved
	}
	if !sess.record.Started {
		return s.first(ctx, sess, spec)
	}
	if err := sess.record.Spec.changeableTo(spec); err != nil {
		return Status{}, err
	}
	sess.asked = true
	defer func() { sess.asked = false }()
	if err := s.tend(ctx, sess, spec); err != nil {
		return Status{}, fmt.Errorf("session %s: %w", spec.ID, err)
	}
	status := sess.current()
	if status.Phase == Faulted {
		return Status{}, fmt.Errorf("%w: %s", ErrFaulted, status.Message)
	}
	return status, nil
}

// first starts a session that never ran, completely or not at all.
func (s *Supervisor) first(ctx context.Context, sess *session, spec Spec) (Status, error) {
	began := time.Now()
	sess.record = record{BootID: s.bootID, Spec: spec}
	sess.show(Starting, "")
	err := s.start(ctx, sess)
	if err == nil {
		klog.FromContext(ctx).Info("MPS session started", "devices", spec.Devices, "percentage", spec.ThreadPercentage,
			"memory", spec.Memory, "multiUser", spec.MultiUser, "daemon", sess.daemon.PID, "took", time.Since(began).Round(time.Millisecond))
		s.keep(ctx, sess, s.options.CheckInterval)
		return sess.current(), nil
	}
	err = fmt.Errorf("start MPS session %s on %s: %w", spec.ID, strings.Join(spec.Devices, ", "), err)
	sess.record.Removing = true
	// The caller may be gone, the remnants must go nevertheless.
	if removeErr := s.remove(context.WithoutCancel(ctx), sess); removeErr != nil {
		s.keep(ctx, sess, s.options.CheckInterval)
		return Status{}, errors.Join(err, removeErr)
	}
	s.forget(sess)
	return Status{}, err
}

// Stop ends a session and removes all of it. There is none: a success. After an
// error in that the removal goes on by itself, and by another Stop; when ctx ends
// before somebody else is done with the session, the session goes on.
func (s *Supervisor) Stop(ctx context.Context, id string) error {
	s.mu.Lock()
	sess := s.sessions[id]
	s.mu.Unlock()
	if sess == nil {
		return nil
	}
	// Nobody should wait for a start that is not wanted any more.
	sess.interrupt()
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "session", id))
	if err := sess.acquire(ctx); err != nil {
		s.keep(ctx, sess, 0)
		return fmt.Errorf("stop MPS session %s, which is busy: %w", id, err)
	}
	defer sess.release()
	if sess.gone {
		return nil
	}
	if err := s.remove(ctx, sess); err != nil {
		s.keep(ctx, sess, s.options.CheckInterval)
		return fmt.Errorf("stop MPS session %s: %w", id, err)
	}
	s.forget(sess)
	klog.FromContext(ctx).Info("MPS session stopped")
	return nil
}

// List tells of all sessions, ordered by ID.
func (s *Supervisor) List() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Status
	for _, id := range slices.Sorted(maps.Keys(s.sessions)) {
		if status := s.sessions[id].current(); status.Spec.ID != "" {
			all = append(all, status)
		}
	}
	return all
}

// Close ends all daemons in order. What is needed to start them again stays. It is
// called once, when no other call is in progress.
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
			if errs[i] = sess.acquire(ctx); errs[i] == nil {
				defer sess.release()
				errs[i] = s.suspend(ctx, sess)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (s *Supervisor) folder(id string) folder { return folder(filepath.Join(s.options.Dir, id)) }

// claim returns the session of that ID with its turn taken, and makes one if there
// is none. It returns nil if the session was removed while this waited.
func (s *Supervisor) claim(ctx context.Context, id string) (*session, error) {
	s.mu.Lock()
	sess := s.sessions[id]
	if sess == nil {
		sess = s.newSession(id)
		s.sessions[id] = sess
	}
	s.mu.Unlock()
	if err := sess.acquire(ctx); err != nil {
		return nil, fmt.Errorf("session %s is busy: %w", id, err)
	}
	if sess.gone {
		sess.release()
		return nil, nil //nolint:nilnil // as said
	}
	return sess, nil
}

// forget takes a session that was removed out of the list. The caller has its turn.
func (s *Supervisor) forget(sess *session) {
	sess.interrupt()
	sess.gone = true
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, sess.id)
}
