// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package lock keeps the goroutines and processes that work on claims and GPUs apart.
// Two instances of the plugin run side by side during an upgrade.
//
// The order is: one claim, then the GPUs of one group. A GPU on which a call does not return stays locked until it does.
package lock

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

const (
	// poll is how often a lock is tried again. In one process those who wait are woken besides.
	poll = 10 * time.Millisecond
	// turn is longer than nearly everything that is done under a lock. A caller that has waited for one turn, for several locks that are
	// hardly ever free together, comes before younger ones in every second turn. In the others they go first: it may be waiting for
	// a slow GPU.
	turn = 5 * time.Second
)

var (
	// ErrBusy means that a lock could not be had in time.
	ErrBusy = errors.New("is busy")
	// ErrElsewhere means that another process has the lock.
	ErrElsewhere = errors.New("in another process")
)

// Locks are exclusive among the goroutines of all processes that use the same folder.
// The kernel frees what a killed process held.
//
// A caller that waits for several GPUs holds none of them meanwhile: the claims of a GPU
// that works must not wait for one that hangs.
type Locks struct {
	// folder has a byte for each lock, by a hash of its name. The kernel locks bytes that are not there: no
	// lock needs a file, which somebody may remove, or space on the disk.
	folder *os.File
	calls  *call.Queues

	mu    sync.Mutex
	taken map[name]bool
	// freed is closed, and made anew, when locks are let go.
	freed chan struct{}
	// waiting are those who wait, the oldest first.
	waiting []*waiter
}

type waiter struct {
	names []name
	since time.Time
}

// name is what a lock is for, in words for messages.
type name string

const (
	gpuPrefix = "GPU "
	// process is locked by each process, all the time.
	process name = "process"
)

func claimLock(uid types.UID) name { return name("claim " + string(uid)) }

func gpuLock(pciAddress string) name { return name(gpuPrefix + pciAddress) }

// offset is the byte of a lock. Two names have the same one as rarely as two UIDs are the same.
func (n name) offset() int64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(n)) // it does not fail
	return int64(hash.Sum64() & math.MaxInt64)
}

// New returns the locks of a folder that nobody removes while the driver runs. All effects on GPUs are in these queues.
func New(folder string, calls *call.Queues) (*Locks, error) {
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return nil, err
	}
	opened, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	l := &Locks{folder: opened, calls: calls, taken: map[name]bool{}, freed: make(chan struct{})}
	return l, l.setByte(process, unix.F_RDLCK)
}

// Alone reports whether no other process has these locks open.
func (l *Locks) Alone() bool { return l.elsewhere(process) == nil }

// Claim waits for the lock of one claim. The error wraps ErrBusy when ctx is done
// first, and ErrElsewhere as well when another process has it.
func (l *Locks) Claim(ctx context.Context, uid types.UID) (release func(), err error) {
	return l.wait(ctx, claimLock(uid))
}

// TryClaim does not wait.
func (l *Locks) TryClaim(uid types.UID) (release func(), err error) {
	w := &waiter{names: []name{claimLock(uid)}}
	if _, err := l.take(w); err != nil {
		return nil, err
	}
	return func() { l.release(w.names) }, nil
}

// GPUs waits for the locks of all these GPUs, also for a call on one of them for which nobody waits any more: an observation
// that was given a second is no reason to fail. When such a call is slow it fails at once, with a *gpu.PendingError;
// otherwise like Claim.
func (l *Locks) GPUs(ctx context.Context, pciAddresses []string) (release func(), err error) {
	var names []name
	for _, address := range pciAddresses {
		names = append(names, gpuLock(address))
	}
	return l.wait(ctx, names...)
}

// ClaimElsewhere reports whether another process has the lock of a claim, or may have it.
func (l *Locks) ClaimElsewhere(uid types.UID) bool { return l.elsewhere(claimLock(uid)) != nil }

// wait takes all locks or none.
func (l *Locks) wait(ctx context.Context, names ...name) (release func(), err error) {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w := &waiter{names: names, since: time.Now()}
	l.mu.Lock()
	l.waiting = append(l.waiting, w)
	l.mu.Unlock()
	defer l.leave(w)
	for {
		freed, err := l.take(w)
		switch {
		case err == nil:
			return func() { l.release(names) }, nil
		case !errors.Is(err, ErrBusy):
			return nil, err
		}
		select {
		case <-freed:
		case <-time.After(poll):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
}

func (l *Locks) leave(w *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = slices.DeleteFunc(l.waiting, func(other *waiter) bool { return other == w })
}

// isBehind reports whether somebody who has waited for longer comes first.
func (l *Locks) isBehind(w *waiter, n name) bool {
	older := l.waiting
	if i := slices.Index(older, w); i >= 0 {
		older = older[:i]
	}
	return slices.ContainsFunc(older, func(other *waiter) bool {
		return time.Since(other.since)/turn%2 == 1 && slices.Contains(other.names, n)
	})
}

// take takes all locks or none. It returns what is closed when it should be tried again; not where a call on one of the GPUs is slow.
func (l *Locks) take(w *waiter) (freed <-chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range w.names {
		out := l.pending(n)
		switch {
		case out != nil && time.Since(out.Since) >= min(call.SlowAfter, l.calls.Limit()):
			return nil, fmt.Errorf("%s is not used before a call on it has returned: %w", n, out)
		case l.taken[n], out != nil, l.isBehind(w, n):
			err = fmt.Errorf("%s %w with another call", n, ErrBusy)
		}
	}
	if err == nil {
		err = l.lockBytes(w.names)
	}
	if err != nil {
		return l.freed, err
	}
	for _, n := range w.names {
		l.taken[n] = true
	}
	return nil, nil
}

// pending returns a call on the GPU that may take effect at any time, because nobody waits for it any more, or nil.
func (l *Locks) pending(n name) *gpu.PendingError {
	pciAddress, isGPU := strings.CutPrefix(string(n), gpuPrefix)
	if !isGPU {
		return nil
	}
	return l.calls.GPU(pciAddress).Pending()
}

// release lets each lock go, that of a GPU with such a call when it has returned.
func (l *Locks) release(names []name) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range names {
		if out := l.pending(n); out != nil {
			go func() {
				<-out.Done
				l.release([]name{n})
			}()
			continue
		}
		l.unlockBytes(n)
		delete(l.taken, n)
	}
	close(l.freed)
	l.freed = make(chan struct{})
}

// lockBytes keeps other processes off, all or none. The bytes of a folder can be locked for reading only, which two may
// do. So each locks a byte before it looks for another one that has: of two at least one sees the other.
//
// Locks belong to the open file: the kernel lets go of them when the process ends. They are of another kind than
// flock's, which others use on this folder.
func (l *Locks) lockBytes(names []name) error {
	for _, n := range names {
		err := l.setByte(n, unix.F_RDLCK)
		if err == nil {
			err = l.elsewhere(n)
		}
		if err != nil {
			l.unlockBytes(names...)
			return fmt.Errorf("%s %w", n, err)
		}
	}
	return nil
}

func (l *Locks) unlockBytes(names ...name) {
	for _, n := range names {
		_ = l.setByte(n, unix.F_UNLCK) // without a folder there is no lock either
	}
}

func (l *Locks) setByte(n name, kind int16) error {
	mine := unix.Flock_t{Type: kind, Start: n.offset(), Len: 1}
	return unix.FcntlFlock(l.folder.Fd(), unix.F_OFD_SETLK, &mine)
}

// elsewhere returns an error if another process has a lock, or if that cannot be told.
func (l *Locks) elsewhere(n name) error {
	other := unix.Flock_t{Type: unix.F_WRLCK, Start: n.offset(), Len: 1}
	err := unix.FcntlFlock(l.folder.Fd(), unix.F_OFD_GETLK, &other)
	if err == nil && other.Type != unix.F_UNLCK {
		return fmt.Errorf("%w %w", ErrBusy, ErrElsewhere)
	}
	return err
}
