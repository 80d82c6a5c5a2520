// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/mps/podend"
	"github.com/partage-dev/partage/pkg/node/podcgroup"
)

// killMargin is how long before a pod is killed its clients are terminated, at most: a
// server needs time for it, and the pod for itself.
const killMargin = 2 * time.Second

// endingPods are those of which the kubelet has said when they will be killed.
type endingPods struct {
	// wake has all sessions observed.
	wake    func()
	options Options

	mu   sync.Mutex
	ends map[types.UID]podend.End
}

// PodEnds implements podend.Handler.
func (e *endingPods) PodEnds(_ context.Context, end podend.End) {
	e.mu.Lock()
	e.ends[end.UID] = end
	e.mu.Unlock()
	e.wake() // to come back in time
}

// PodEnded implements podend.Handler.
func (e *endingPods) PodEnded(uid types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.ends, uid)
}

// doomAt is from when on the clients of a pod are terminated.
func doomAt(end podend.End) time.Time { return end.At.Add(-min(killMargin, end.Grace/2)) }

// next returns when sessions must be observed because of a pod that is about to be killed, at the latest after a pause. A
// process that comes late is one of their clients soon.
func (e *endingPods) next(now time.Time, pause time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	for uid, end := range e.ends {
		if now.After(end.At.Add(e.options.CommandLimit)) {
			delete(e.ends, uid) // it has outlived its end, for whatever reason
			continue
		}
		if left := doomAt(end).Sub(now); left > 0 {
			pause = min(pause, left)
		} else {
			pause = min(pause, e.options.CheckInterval/2)
		}
	}
	return pause
}

// isDoomed reports whether a process is in a pod that is about to be killed.
func (e *endingPods) isDoomed(pid int, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.ends) == 0 {
		return false
	}
	pod, _ := podcgroup.OfProcess(procfs, pid)
	end, found := e.ends[types.UID(pod.UID)]
	return found && !now.Before(doomAt(end))
}
