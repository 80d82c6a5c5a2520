// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/pkg/mps/process"
	"github.com/partage-dev/partage/pkg/mps/tenant"
)

// killMargin is how long before a pod is killed its clients are terminated, at most: a
// server needs time for it, and the pod for itself.
const killMargin = 2 * time.Second

// margin is the part of a grace period that the clients of a pod do not have.
func margin(grace time.Duration) time.Duration { return min(killMargin, grace/2) }

// endings terminates the clients of pods that are about to be killed.
type endings struct {
	supervisor *Supervisor

	mu      sync.Mutex
	pending map[types.UID]*pendingEnd
}

// pendingEnd can be called off.
type pendingEnd struct{ cancel context.CancelFunc }

// PodEnds implements podend.Handler.
func (e *endings) PodEnds(ctx context.Context, end podend.End) {
	ctx, cancel := context.WithCancel(ctx)
	pending := &pendingEnd{cancel: cancel}
	e.mu.Lock()
	defer e.mu.Unlock()
	if before := e.pending[end.UID]; before != nil {
		before.cancel()
	}
	e.pending[end.UID] = pending
	e.supervisor.wg.Go(func() {
		defer cancel()
		e.supervisor.endPod(ctx, end)
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.pending[end.UID] == pending {
			delete(e.pending, end.UID)
		}
	})
}

// PodEnded implements podend.Handler.
func (e *endings) PodEnded(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if pending := e.pending[uid]; pending != nil {
		pending.cancel()
	}
}

// watchPods terminates clients before their pods are killed, until the supervisor closes.
func (s *Supervisor) watchPods(ctx context.Context) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	go func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	watcher := podend.Watcher{Socket: s.options.PodsSocket, Retry: s.options.PodsRetry}
	watcher.Run(ctx, &endings{supervisor: s, pending: map[types.UID]*pendingEnd{}})
}

// endPod waits until a pod is about to be killed, and terminates its clients until it is.
func (s *Supervisor) endPod(ctx context.Context, end podend.End) {
	until := end.At.Add(s.options.CommandLimit)
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	timer := time.NewTimer(time.Until(end.At.Add(-margin(end.Grace))))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		s.terminatePod(ctx, end)
		// A process that comes late is one of the status soon.
		timer.Reset(s.options.CheckInterval / 2)
	}
}

// terminatePod terminates the clients of a pod, in all sessions at the same time: none waits
// for the daemon of another.
func (s *Supervisor) terminatePod(ctx context.Context, end podend.End) {
	uid := string(end.UID)
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, sess := range s.all() {
		if len(ofPod(sess.daemon.status.get().Clients, uid)) == 0 {
			continue
		}
		wg.Go(func() {
			ctx := sessionContext(ctx, sess.id)
			if err := s.terminateClients(ctx, sess, uid); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "MPS clients cannot be terminated before their pod is killed",
					"pod", klog.KRef(end.Namespace, end.Name), "podUID", end.UID)
			}
		})
	}
}

// ofPod returns those of the PIDs that are in a pod.
func ofPod(pids []int, uid string) []int {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool {
		pod, ok := tenant.PodOf(pid)
		return !ok || pod.UID != uid
	})
}

// terminateClients terminates the clients of a pod in one session. A daemon that does not
// answer costs it the time of one answer.
func (s *Supervisor) terminateClients(ctx context.Context, sess *session, uid string) error {
	ctx, cancel := context.WithTimeout(ctx, s.options.CommandLimit)
	defer cancel()
	if err := sess.lock(ctx); err != nil {
		return fmt.Errorf("the session is busy: %w", err)
	}
	defer sess.unlock()
	d := sess.daemon
	if sess.gone || d.process.Ended() {
		return nil
	}
	ctl, err := d.client()
	if err != nil {
		return err
	}
	// A client that cannot be terminated keeps no other from it.
	var errs []error
	for _, server := range process.PIDs(d.record.Servers) {
		pids, err := ctl.Clients(ctx, server)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, pid := range ofPod(pids, uid) {
			errs = append(errs, d.terminate(ctx, ctl, server, pid))
		}
	}
	return errors.Join(errs...)
}

// terminate terminates a client, once. One that has ended meanwhile is no error.
func (d *daemon) terminate(ctx context.Context, ctl control.Client, server, pid int) error {
	c := d.watchClient(pid)
	if c == nil || c.terminated || c.process.Ended() {
		return nil
	}
	if err := ctl.Terminate(ctx, server, pid); err != nil {
		if c.process.Ended() {
			return nil
		}
		return err
	}
	c.terminated = true
	klog.FromContext(ctx).Info("Terminated an MPS client whose pod is about to be killed", "pid", pid, "server", server)
	return nil
}
