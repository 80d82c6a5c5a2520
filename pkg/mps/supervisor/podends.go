// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/pkg/podcgroup"
)

// killMargin is how long before a pod is killed its clients are terminated, at most: a
// server needs time for it, and the pod for itself.
const killMargin = 2 * time.Second

// margin is the part of a grace period that the clients of a pod do not have.
func margin(grace time.Duration) time.Duration { return min(killMargin, grace/2) }

// endingPods are those of which the kubelet has said when they will be killed.
type endingPods struct {
	// wake has all sessions observed, interval is the time between two observations of a session whose clients are about to
	// be killed, and after is how long a pod may outlive the time of its end.
	wake            func()
	interval, after time.Duration

	mu   sync.Mutex
	ends map[types.UID]*doomedPod
}

// doomedPod is one of them, which may be called off.
type doomedPod struct {
	podend.End
	cancel context.CancelFunc
}

// PodEnds implements podend.Handler.
func (e *endingPods) PodEnds(ctx context.Context, end podend.End) {
	ctx, cancel := context.WithDeadline(ctx, end.At.Add(e.after))
	e.mu.Lock()
	defer e.mu.Unlock()
	if before := e.ends[end.UID]; before != nil {
		before.cancel()
	}
	one := &doomedPod{end, cancel}
	e.ends[end.UID] = one
	go func() {
		defer cancel()
		e.follow(ctx, end)
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.ends[end.UID] == one {
			delete(e.ends, end.UID)
		}
	}()
}

// follow wakes the sessions while a pod is about to be killed. A process that comes late is one of its clients soon.
func (e *endingPods) follow(ctx context.Context, end podend.End) {
	timer := time.NewTimer(time.Until(end.At.Add(-margin(end.Grace))))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			e.wake()
			timer.Reset(e.interval)
		}
	}
}

// PodEnded implements podend.Handler.
func (e *endingPods) PodEnded(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if one := e.ends[uid]; one != nil {
		one.cancel()
	}
}

// isDoomed reports whether a process is in a pod that is about to be killed.
func (e *endingPods) isDoomed(pid int, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.ends) == 0 {
		return false
	}
	pod, found := podcgroup.OfProcess(procfs, pid)
	end := e.ends[types.UID(pod.UID)]
	return found && end != nil && !now.Before(end.At.Add(-margin(end.Grace)))
}
