// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
)

// filePoll is how often a lock that another process holds is tried. That is the
// case during an upgrade only; in one process the next in the queue is woken.
const filePoll = 10 * time.Millisecond

const (
	lockSuffix  = ".lock"
	claimPrefix = "claim-"
)

// locks are exclusive among the goroutines of all processes that use the same
// folder. The order is: one claim, then its GPUs by PCI address. The kernel
// frees what a killed process held.
type locks struct {
	dir string

	mu     sync.Mutex
	queues map[string]*queue
}

// queue lets the goroutines of this process in one after another, in the order
// in which they came.
type queue struct {
	turn  chan struct{}
	users int
}

func newLocks(dir string) (*locks, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("locks: %w", err)
	}
	return &locks{dir: dir, queues: map[string]*queue{}}, nil
}

// claim waits for the lock of one claim.
func (l *locks) claim(ctx context.Context, uid types.UID) (release func(), err error) {
	release, err = l.acquire(ctx, claimPrefix+string(uid), true)
	if err != nil {
		return nil, fmt.Errorf("claim %s is busy with another call: %w", uid, err)
	}
	return release, nil
}

// tryClaim does not wait. It returns nil for a lock that is held.
func (l *locks) tryClaim(uid types.UID) (release func(), err error) {
	name := claimPrefix + string(uid)
	q := l.join(name)
	select {
	case q.turn <- struct{}{}:
	default:
		l.leave(name, q)
		return nil, nil
	}
	file := flock.New(l.path(name))
	if locked, err := lockPresent(file, file.TryLock); err != nil || !locked {
		l.next(name, q)
		return nil, err
	}
	return l.releaser(name, q, file, true), nil
}

// gpus waits for the locks of all GPUs, which must be in lock order.
func (l *locks) gpus(ctx context.Context, pciAddresses []string) (release func(), err error) {
	var held []func()
	release = func() {
		for _, r := range held {
			r()
		}
	}
	for _, address := range pciAddresses {
		r, err := l.acquire(ctx, device.GPUName(address), false)
		if err != nil {
			release()
			return nil, fmt.Errorf("GPU %s is busy with another claim: %w", address, err)
		}
		held = append(held, r)
	}
	return release, nil
}

// acquire waits for a lock until ctx is done. The file of a transient one goes
// away with its last holder.
func (l *locks) acquire(ctx context.Context, name string, transient bool) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	q := l.join(name)
	select {
	case q.turn <- struct{}{}:
	case <-ctx.Done():
		l.leave(name, q)
		return nil, ctx.Err()
	}
	for {
		file := flock.New(l.path(name))
		present, err := lockPresent(file, func() (bool, error) { return file.TryLockContext(ctx, filePoll) })
		if err != nil {
			l.next(name, q)
			return nil, err
		}
		if present {
			return l.releaser(name, q, file, transient), nil
		}
	}
}

func (l *locks) path(name string) string { return filepath.Join(l.dir, name+lockSuffix) }

// lockPresent locks a file and makes sure that it is still the one that others
// would open: its last holder may have removed it in between.
func lockPresent(file *flock.Flock, lock func() (bool, error)) (bool, error) {
	if locked, err := lock(); err != nil || !locked {
		return false, err
	}
	held, err := file.Stat()
	if err != nil {
		return false, errors.Join(err, file.Unlock())
	}
	present, err := os.Stat(file.Path())
	switch {
	case err == nil && os.SameFile(held, present):
		return true, nil
	case err == nil || errors.Is(err, fs.ErrNotExist):
		return false, file.Unlock()
	}
	return false, errors.Join(err, file.Unlock())
}

func (l *locks) releaser(name string, q *queue, file *flock.Flock, transient bool) func() {
	return func() {
		if transient {
			// Left behind, it is an empty file that sweep takes away.
			_ = os.Remove(file.Path())
		}
		// It fails for a bad descriptor only, which holds no lock either.
		_ = file.Unlock()
		l.next(name, q)
	}
}

func (l *locks) join(name string) *queue {
	l.mu.Lock()
	defer l.mu.Unlock()
	q := l.queues[name]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		l.queues[name] = q
	}
	q.users++
	return q
}

func (l *locks) next(name string, q *queue) {
	<-q.turn
	l.leave(name, q)
}

func (l *locks) leave(name string, q *queue) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(l.queues, name)
	}
}

// sweep removes the lock files that killed processes left.
func (l *locks) sweep() error {
	files, err := filepath.Glob(filepath.Join(l.dir, claimPrefix+"*"+lockSuffix))
	if err != nil {
		return err
	}
	for _, file := range files {
		uid := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), claimPrefix), lockSuffix)
		release, err := l.tryClaim(types.UID(uid))
		if err != nil {
			return fmt.Errorf("lock of claim %s: %w", uid, err)
		}
		if release != nil {
			release()
		}
	}
	return nil
}
