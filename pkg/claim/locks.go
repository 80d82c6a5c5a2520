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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// filePoll is how often a lock that another process holds is tried. That is the
// case during an upgrade only; in one process those who wait are woken.
const filePoll = 10 * time.Millisecond

const (
	lockSuffix  = ".lock"
	claimPrefix = "claim-"
)

// locks are exclusive among the goroutines of all processes that use the same
// folder. The order is: one claim, then all its GPUs at once. The kernel frees
// what a killed process held.
//
// Who waits for several GPUs holds none of them meanwhile: the claims of a GPU
// that works must not wait for one that hangs.
type locks struct {
	dir string

	mu    sync.Mutex
	taken map[lockName]bool
	// waiting are in the order in which they came.
	waiting []*waiter
	// out are the calls that have not returned, by the lock of their GPU.
	out map[lockName][]*gpu.HungError
}

type waiter struct {
	names []lockName
	// granted has room for the one answer.
	granted chan error
}

// lockName is what a lock is for: the name of its file, and words for messages.
type lockName struct{ file, text string }

func claimLock(uid types.UID) lockName {
	return lockName{file: claimPrefix + string(uid), text: "claim " + string(uid)}
}

func gpuLock(pciAddress string) lockName {
	return lockName{file: device.GPUName(pciAddress), text: "GPU " + pciAddress}
}

// transient locks are removed by their last holder.
func (n lockName) transient() bool { return strings.HasPrefix(n.file, claimPrefix) }

func newLocks(dir string) (*locks, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("locks: %w", err)
	}
	return &locks{dir: dir, taken: map[lockName]bool{}, out: map[lockName][]*gpu.HungError{}}, nil
}

// claim waits for the lock of one claim.
func (l *locks) claim(ctx context.Context, uid types.UID) (release func(), err error) {
	return l.acquire(ctx, []lockName{claimLock(uid)}, "call")
}

// tryClaim does not wait. It returns nil for a lock that is held.
func (l *locks) tryClaim(uid types.UID) (release func(), err error) {
	return l.try([]lockName{claimLock(uid)})
}

// gpus waits for the locks of all these GPUs. It fails at once, with a
// *gpu.HungError, when a call on one of them has not returned.
func (l *locks) gpus(ctx context.Context, pciAddresses []string) (release func(), err error) {
	var names []lockName
	for _, address := range pciAddresses {
		names = append(names, gpuLock(address))
	}
	return l.acquire(ctx, names, "claim")
}

// tryGPU does not wait. It returns nil for a lock that is held, and fails like
// gpus.
func (l *locks) tryGPU(pciAddress string) (release func(), err error) {
	return l.try([]lockName{gpuLock(pciAddress)})
}

// elsewhere tells whether a lock that tryGPU did not get is another process's.
func (l *locks) elsewhere(pciAddress string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.taken[gpuLock(pciAddress)]
}

// stuck says that a call on a GPU has not returned. Whoever waits for the GPU
// stops, and its lock is not free before the call returns: until then the call
// may take effect at any time.
func (l *locks) stuck(pciAddress string, call *gpu.HungError) {
	name := gpuLock(pciAddress)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Contains(l.out[name], call) {
		l.out[name] = append(l.out[name], call)
	}
	if l.callOut(name) == nil {
		return // it has returned meanwhile
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool {
		if !slices.Contains(w.names, name) {
			return false
		}
		w.granted <- notUsable(name, call)
		return true
	})
}

func notUsable(name lockName, call *gpu.HungError) error {
	return fmt.Errorf("%s is not used before a call on it has returned: %w", name.text, call)
}

// callOut is a call on a GPU that has not returned, or nil. There may be several:
// what only looks at a GPU does so without its lock. The caller holds mu.
func (l *locks) callOut(name lockName) *gpu.HungError {
	out := slices.DeleteFunc(l.out[name], func(call *gpu.HungError) bool {
		select {
		case <-call.Done:
			return true
		default:
			return false
		}
	})
	if len(out) == 0 {
		delete(l.out, name)
		return nil
	}
	l.out[name] = out
	return out[0]
}

// stillOut is callOut for those who do not hold mu.
func (l *locks) stillOut(name lockName) *gpu.HungError {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.callOut(name)
}

// acquire waits for all locks until ctx is done. The user is the kind of what
// holds such locks, for messages.
func (l *locks) acquire(ctx context.Context, names []lockName, user string) (func(), error) {
	for {
		if err := l.reserve(ctx, names, user); err != nil {
			return nil, err
		}
		files, busy, err := l.lockFiles(names)
		if err == nil && busy == nil {
			return l.releaser(names, files), nil
		}
		l.free(names)
		if err != nil {
			return nil, err
		}
		// Another process has it.
		if err := pause(ctx, filePoll); err != nil {
			return nil, isBusy(*busy, user, err)
		}
	}
}

// errBusy: somebody else has a lock.
var errBusy = errors.New("is busy")

func isBusy(name lockName, user string, err error) error {
	return fmt.Errorf("%s %w with another %s: %w", name.text, errBusy, user, err)
}

// try returns nil where one of the locks is held.
func (l *locks) try(names []lockName) (func(), error) {
	l.mu.Lock()
	_, taken := l.firstTaken(names)
	err := l.usable(names)
	if err == nil && !taken {
		l.take(names)
	}
	l.mu.Unlock()
	if err != nil || taken {
		return nil, err
	}
	files, busy, err := l.lockFiles(names)
	if err != nil || busy != nil {
		l.free(names)
		return nil, err
	}
	return l.releaser(names, files), nil
}

// reserve waits until no other goroutine of this process has any of the locks.
func (l *locks) reserve(ctx context.Context, names []lockName, user string) error {
	l.mu.Lock()
	if err := l.usable(names); err != nil {
		l.mu.Unlock()
		return err
	}
	if _, taken := l.firstTaken(names); !taken {
		err := ctx.Err()
		if err == nil {
			l.take(names)
		}
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
func (l *locks) giveUp(w *waiter, user string, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, w)
	if i < 0 {
		return <-w.granted
	}
	l.waiting = slices.Delete(l.waiting, i, i+1)
	busy, _ := l.firstTaken(w.names)
	return isBusy(busy, user, err)
}

// usable fails when a call on one of the GPUs is out. The caller holds mu.
func (l *locks) usable(names []lockName) error {
	for _, name := range names {
		if call := l.callOut(name); call != nil {
			return notUsable(name, call)
		}
	}
	return nil
}

// firstTaken finds a lock that somebody in this process has. The caller holds mu.
func (l *locks) firstTaken(names []lockName) (lockName, bool) {
	for _, name := range names {
		if l.taken[name] {
			return name, true
		}
	}
	return lockName{}, false
}

// take must follow firstTaken without letting go of mu.
func (l *locks) take(names []lockName) {
	for _, name := range names {
		l.taken[name] = true
	}
}

// free lets those in who wait for nothing else.
func (l *locks) free(names []lockName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range names {
		delete(l.taken, name)
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool {
		if _, taken := l.firstTaken(w.names); taken {
			return false
		}
		l.take(w.names)
		w.granted <- nil
		return true
	})
}

func (l *locks) path(name lockName) string { return filepath.Join(l.dir, name.file+lockSuffix) }

// lockFiles takes all files or none, and tells which one another process holds.
func (l *locks) lockFiles(names []lockName) (files []*flock.Flock, busy *lockName, err error) {
	for i, name := range names {
		file := flock.New(l.path(name))
		locked, err := lockPresent(file)
		if err == nil && locked {
			files = append(files, file)
			continue
		}
		for j, held := range files {
			unlock(names[j], held)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("lock of %s: %w", name.text, err)
		}
		return nil, &names[i], nil
	}
	return files, nil, nil
}

// lockPresent locks a file and makes sure that it is still the one that others
// would open: its last holder may have removed it in between.
func lockPresent(file *flock.Flock) (bool, error) {
	for {
		if locked, err := file.TryLock(); err != nil || !locked {
			return false, err
		}
		held, err := file.Stat()
		if err != nil {
			return false, errors.Join(err, file.Unlock())
		}
		present, err := os.Stat(file.Path())
		if err == nil && os.SameFile(held, present) {
			return true, nil
		}
		if unlockErr := file.Unlock(); unlockErr != nil || (err != nil && !errors.Is(err, fs.ErrNotExist)) {
			return false, errors.Join(err, unlockErr)
		}
	}
}

func unlock(name lockName, file *flock.Flock) {
	if name.transient() {
		// Left behind, it is an empty file that sweep takes away.
		_ = os.Remove(file.Path())
	}
	// It fails for a bad descriptor only, which holds no lock either.
	_ = file.Unlock()
}

// releaser lets each lock go, those of GPUs with a call that is out when it has
// returned.
func (l *locks) releaser(names []lockName, files []*flock.Flock) func() {
	return func() {
		var now []lockName
		for i, name := range names {
			call := l.stillOut(name)
			if call == nil {
				unlock(name, files[i])
				now = append(now, name)
				continue
			}
			go func() {
				for ; call != nil; call = l.stillOut(name) {
					<-call.Done
				}
				unlock(name, files[i])
				l.free([]lockName{name})
			}()
		}
		l.free(now)
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
			return err
		}
		if release != nil {
			release()
		}
	}
	return nil
}
