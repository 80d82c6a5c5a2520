// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package lock keeps the goroutines and processes that work on claims and GPUs apart.
// Two instances of the plugin run side by side during an upgrade.
//
// The order is: one claim, then the GPUs of one group. A GPU on which a call does not
// return stays locked until it does.
package lock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/steptime"
	"github.com/partage-dev/partage/pkg/wait"
)

// filePoll is how often a lock that another process holds is tried. That happens
// during an upgrade only; in one process those who wait are woken.
const filePoll = 10 * time.Millisecond

// maxOvertaken is how often others may get a lock before one who waits for several
// locks at once. After that nobody else gets any of them first.
const maxOvertaken = 8

// Locks are exclusive among the goroutines of all processes that use the same folder.
// The kernel frees what a killed process held.
//
// A caller that waits for several GPUs holds none of them meanwhile: the claims of a GPU
// that works must not wait for one that hangs.
type Locks struct {
	dir string
	// file has the locks, and folder another that says that it is open.
	file, folder *os.File

	mu    sync.Mutex
	taken map[name]bool
	// waiting are in the order in which they came.
	waiting []*waiter
	// hung are the calls that have not returned, by the lock of their GPU.
	hung map[name][]*gpu.PendingError
}

type waiter struct {
	names []name
	// granted has room for the one answer.
	granted chan error
	// overtaken counts the locks that others got first.
	overtaken int
}

// name is what a lock is for, in words for messages.
type name string

func claimLock(uid types.UID) name { return name("claim " + string(uid)) }

func gpuLock(pciAddress string) name { return name("GPU " + pciAddress) }

// New returns the locks in a folder within the data folder, which nobody removes while the driver
// runs.
func New(dir string) (*Locks, error) {
	l := &Locks{dir: dir, taken: map[name]bool{}, hung: map[name][]*gpu.PendingError{}}
	_, err := l.open()
	return l, err
}

// Claim waits for the lock of one claim. The error wraps ErrBusy when ctx is done
// first, and ErrElsewhere as well when another process has it.
func (l *Locks) Claim(ctx context.Context, uid types.UID) (release func(), err error) {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	return l.acquire(ctx, []name{claimLock(uid)}, "call")
}

// TryClaim does not wait. It returns nil for a lock that is held.
func (l *Locks) TryClaim(uid types.UID) (release func(), err error) {
	return l.try([]name{claimLock(uid)})
}

// GPUs waits for the locks of all these GPUs. It fails at once, with a
// *gpu.PendingError, when a call on one of them has not returned; otherwise like Claim.
func (l *Locks) GPUs(ctx context.Context, pciAddresses []string) (release func(), err error) {
	var names []name
	for _, address := range pciAddresses {
		names = append(names, gpuLock(address))
	}
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	return l.acquire(ctx, names, "claim")
}

// TryGPU does not wait. It returns nil for a lock that is held, and fails like GPUs.
func (l *Locks) TryGPU(pciAddress string) (release func(), err error) {
	return l.try([]name{gpuLock(pciAddress)})
}

// ClaimElsewhere reports whether a lock that TryClaim did not get is another process's.
func (l *Locks) ClaimElsewhere(uid types.UID) bool { return l.elsewhere(claimLock(uid)) }

// GPUElsewhere reports whether a lock that TryGPU did not get is another process's.
func (l *Locks) GPUElsewhere(pciAddress string) bool { return l.elsewhere(gpuLock(pciAddress)) }

func (l *Locks) elsewhere(n name) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.taken[n]
}

var (
	// ErrBusy means that a lock could not be had in time.
	ErrBusy = errors.New("is busy")
	// ErrElsewhere means that another process has the lock.
	ErrElsewhere = errors.New("in another process")
)

func busyError(n name, user string, err error) error {
	return fmt.Errorf("%s %w with another %s: %w", n, ErrBusy, user, err)
}

// try takes all locks or none. It returns nil where one of them is held.
func (l *Locks) try(names []name) (release func(), err error) {
	l.mu.Lock()
	reserved, err := l.takeFree(names)
	l.mu.Unlock()
	if err != nil || !reserved {
		return nil, err
	}
	held, err := l.lockFile(names)
	if err != nil || held != "" {
		l.free(names)
		return nil, err
	}
	return l.releaser(names), nil
}

// acquire takes all locks or none, and waits for them until ctx is done. The user is the kind of
// what holds such locks, for messages.
func (l *Locks) acquire(ctx context.Context, names []name, user string) (release func(), err error) {
	var held name
	for {
		if err := l.reserve(ctx, names, user); err != nil {
			if held != "" && ctx.Err() != nil && !errors.Is(err, ErrBusy) {
				err = busyError(held, user, fmt.Errorf("%w: %w", ErrElsewhere, err))
			}
			return nil, err
		}
		var err error
		held, err = l.lockFile(names)
		if err == nil && held == "" {
			return l.releaser(names), nil
		}
		l.free(names)
		if err != nil {
			return nil, err
		}
		if err := wait.For(ctx, filePoll); err != nil {
			return nil, busyError(held, user, fmt.Errorf("%w: %w", ErrElsewhere, err))
		}
	}
}

// takeFree takes all locks that no other goroutine of this process has, or none. The caller holds mu.
func (l *Locks) takeFree(names []name) (bool, error) {
	if err := l.checkHung(names); err != nil {
		return false, err
	}
	if l.unavailable(names, len(l.waiting)) != "" {
		return false, nil
	}
	l.take(names, len(l.waiting))
	return true, nil
}

// reserve waits until no other goroutine of this process has any of the locks.
func (l *Locks) reserve(ctx context.Context, names []name, user string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	reserved, err := l.takeFree(names)
	if err != nil || reserved {
		l.mu.Unlock()
		return err
	}
	w := &waiter{names: names, granted: make(chan error, 1)}
	l.waiting = append(l.waiting, w)
	l.mu.Unlock()
	select {
	case err := <-w.granted:
		return err
	case <-ctx.Done():
		return l.giveUp(w, user, ctx.Err())
	}
}

// giveUp stops waiting, unless the locks were granted at this very moment.
func (l *Locks) giveUp(w *waiter, user string, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, w)
	if i < 0 {
		return <-w.granted
	}
	held := l.unavailable(w.names, i)
	l.waiting = slices.Delete(l.waiting, i, i+1)
	// Others may have waited behind this one.
	l.grant()
	return busyError(held, user, err)
}

// unavailable finds a lock that somebody in this process has, or that one of the first
// waiters has waited for too long. The caller holds mu.
func (l *Locks) unavailable(names []name, ahead int) name {
	for _, n := range names {
		overtaken := func(w *waiter) bool { return w.overtaken >= maxOvertaken && slices.Contains(w.names, n) }
		if l.taken[n] || slices.ContainsFunc(l.waiting[:ahead], overtaken) {
			return n
		}
	}
	return ""
}

// take must follow unavailable without letting go of mu.
func (l *Locks) take(names []name, ahead int) {
	for _, n := range names {
		l.taken[n] = true
		for _, w := range l.waiting[:ahead] {
			if slices.Contains(w.names, n) {
				w.overtaken++
			}
		}
	}
}

// free lets those in who wait for nothing else.
func (l *Locks) free(names []name) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range names {
		delete(l.taken, n)
	}
	l.grant()
}

// grant needs mu.
func (l *Locks) grant() {
	for i := 0; i < len(l.waiting); {
		w := l.waiting[i]
		if l.unavailable(w.names, i) != "" {
			i++
			continue
		}
		l.take(w.names, i)
		l.waiting = slices.Delete(l.waiting, i, i+1)
		w.granted <- nil
	}
}

// releaser lets each lock go, those of GPUs with a hung call when it has returned.
func (l *Locks) releaser(names []name) func() {
	return func() {
		var now []name
		for _, n := range names {
			call := l.hungCall(n)
			if call == nil {
				l.unlockFile(n)
				now = append(now, n)
				continue
			}
			go func() {
				for ; call != nil; call = l.hungCall(n) {
					<-call.Done
				}
				l.unlockFile(n)
				l.free([]name{n})
			}()
		}
		l.free(now)
	}
}
