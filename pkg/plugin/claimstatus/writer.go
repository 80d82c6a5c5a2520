// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claimstatus keeps status.devices of ResourceClaims: what the driver says about the
// devices that the claims of this node have prepared.
//
// The driver's entries are written by server-side apply, so that those of other drivers and
// the rest of the status stay as they are. Nothing waits for it: it can be behind, and it
// catches up. Per claim and change there is one request.
//
//	writer.go  what is wanted, and when to write it
//	apply.go   one request
//	entry.go   what is known of a claim
//	ledger.go  which claims may have entries, for the process that comes next
package claimstatus

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/internal/precedence"
)

const (
	// removalDelay is how long entries of a claim that was unprepared are left alone. Most
	// claims are deleted when their pod is, and need no write then; one that is prepared
	// again needs one and not two.
	removalDelay = 10 * time.Second
	// firstRetry and lastRetry are the pauses after failures about one claim.
	firstRetry, lastRetry = time.Second, 10 * time.Minute
	// forbiddenPause and droppedPause are for how long nothing is written in a cluster that
	// has never let the driver write.
	forbiddenPause, droppedPause = 10 * time.Minute, time.Hour
	// recheckInterval is how long what the API server has is believed, less up to
	// recheckJitter: somebody may have changed it.
	recheckInterval, recheckJitter = time.Hour, 10 * time.Minute
	// precedenceInterval is the time between two looks whether a newer instance of the plugin still
	// runs, or whether it can be found out now which claims have a status. As long as this instance
	// writes, it looks for a newer one whenever it is told something and before it writes: a timer costs
	// an idle node more.
	precedenceInterval = 2 * time.Second
	// requestTime bounds one request, and workers is how many are made at the same time.
	requestTime = 10 * time.Second
	workers     = 2
)

// Options are all mandatory.
type Options struct {
	DriverName string
	// Client has a budget of its own: nothing that pods wait for is to wait for this.
	Client kubernetes.Interface
	// Dir is a folder for the claims that may have entries. It is made if absent.
	Dir string
	// LockFile makes one of several instances on this node write.
	LockFile string

	// removalDelay and recheckInterval are shorter in tests.
	removalDelay, recheckInterval time.Duration
}

// Counts are how often something has happened since the start.
type Counts struct {
	// Written counts requests that changed a claim's entries or removed them, Failed those
	// that will be repeated. Forbidden and Dropped are among the failed: the driver lacks a
	// permission, or the cluster does not store what it writes.
	Written, Failed, Forbidden, Dropped int64
}

// Writer brings the status of claims to what Set was told last.
type Writer struct {
	applier
	ledger ledger
	queue  workqueue.TypedRateLimitingInterface[types.UID]

	removalDelay, recheckInterval time.Duration

	// look asks for a look for a newer instance. looking is held until what it has found counts.
	look       loop.Trigger
	looking    sync.Mutex
	precedence *precedence.Precedence

	mu      sync.Mutex
	entries map[types.UID]*entry
	// told says that Set was called: before, it is not known which claims are prepared.
	told bool
	// mine says that this instance writes.
	mine bool
	// works says that the cluster has stored an entry, and paused until when it is not asked,
	// because it never has.
	works  bool
	paused time.Time

	written, failed, forbidden, dropped atomic.Int64

	problem, lockProblem, ledgerProblem logchange.Problem
}

// New makes a Writer, which does nothing before Run.
func New(o Options) *Writer {
	if o.removalDelay == 0 {
		o.removalDelay = removalDelay
	}
	if o.recheckInterval == 0 {
		o.recheckInterval = recheckInterval - rand.N(recheckJitter) //nolint:gosec // no secret
	}
	pauses := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](firstRetry, lastRetry)
	return &Writer{
		applier: applier{driver: o.DriverName, client: o.Client}, ledger: ledger{dir: o.Dir},
		precedence: precedence.New(o.LockFile), removalDelay: o.removalDelay, recheckInterval: o.recheckInterval,
		queue: workqueue.NewTypedRateLimitingQueue(pauses), look: loop.NewTrigger(), entries: map[types.UID]*entry{},
	}
}

// Counts returns what has happened so far.
func (w *Writer) Counts() Counts {
	return Counts{Written: w.written.Load(), Failed: w.failed.Load(), Forbidden: w.forbidden.Load(), Dropped: w.dropped.Load()}
}

// Set says what there is to say, of all prepared claims. Entries of other claims are removed.
// It never blocks.
func (w *Writer) Set(claims []Claim) {
	w.look.Fire()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.told = true
	prepared := make(map[types.UID]bool, len(claims))
	for _, c := range claims {
		prepared[c.Ref.UID] = true
		e := w.entries[c.Ref.UID]
		if e == nil {
			e = &entry{ref: c.Ref}
			w.entries[c.Ref.UID] = e
		}
		if e.want(c) {
			w.queue.Forget(c.Ref.UID)
			w.queue.Add(c.Ref.UID)
		}
	}
	for uid, e := range w.entries {
		if !prepared[uid] && e.release() {
			w.queue.Forget(uid)
			w.queue.AddAfter(uid, w.removalDelay)
		}
	}
}

// Run writes until ctx ends.
func (w *Writer) Run(ctx context.Context) {
	defer w.precedence.End()
	context.AfterFunc(ctx, w.queue.ShutDown)
	var running sync.WaitGroup
	defer running.Wait()
	mine := w.checkPrecedence(ctx)
	for range workers {
		running.Go(func() { w.work(ctx) })
	}
	for {
		var again <-chan time.Time
		if !mine {
			again = time.After(precedenceInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-w.look:
		case <-again:
		}
		mine = w.checkPrecedence(ctx)
	}
}

// checkPrecedence finds out, and returns, whether this instance writes. One that begins to, or begins
// again, does not know what others have written.
func (w *Writer) checkPrecedence(ctx context.Context) bool {
	w.looking.Lock()
	defer w.looking.Unlock()
	mine, err := w.precedence.Mine()
	w.lockProblem.Log(ctx, err, "It is not known whether a newer instance of the plugin runs, writing the status of claims as if there were none", "")
	mine = mine || err != nil
	w.mu.Lock()
	defer w.mu.Unlock()
	if began := mine && !w.mine; !began {
		w.mine = mine
		return mine
	}
	recorded, err := w.ledger.read()
	w.ledgerProblem.Log(ctx, err, "It is not known which claims may have an outdated status", "")
	if err != nil {
		return false // it is tried again
	}
	w.mine = true
	for uid, ref := range recorded {
		if w.entries[uid] == nil {
			w.entries[uid] = &entry{ref: ref}
		}
	}
	for uid, e := range w.entries {
		_, e.recorded = recorded[uid]
		e.known, e.removing = false, false
		switch {
		case e.wanted != nil:
			w.queue.Add(uid)
		case w.told && e.release():
			w.queue.AddAfter(uid, w.removalDelay)
		}
	}
	return true
}

func (w *Writer) work(ctx context.Context) {
	for {
		uid, ended := w.queue.Get()
		if ended {
			return
		}
		w.handle(ctx, uid)
		w.queue.Done(uid)
	}
}

func (w *Writer) handle(ctx context.Context, uid types.UID) {
	if !w.checkPrecedence(ctx) {
		w.look.Fire() // from now on again and again
		return        // it comes again when that changes
	}
	w.mu.Lock()
	e := w.entries[uid]
	if e == nil || !w.told {
		w.mu.Unlock() // so does this
		return
	}
	task := *e
	if !e.recheck.IsZero() && !time.Now().Before(e.recheck) {
		task.known = false
	}
	wait := time.Until(w.paused)
	w.mu.Unlock()
	if wait > 0 {
		w.queue.AddAfter(uid, wait+rand.N(firstRetry)) //nolint:gosec // no secret
		return
	}
	limited, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	err := w.bring(limited, &task)
	if ctx.Err() != nil {
		return
	}
	w.settle(ctx, uid, &task, err)
}

// bring makes one claim's entries what they have to be.
func (w *Writer) bring(ctx context.Context, e *entry) error {
	if e.wanted == nil {
		return w.remove(ctx, e)
	}
	if !e.known && e.recorded {
		if err := w.read(ctx, e); err != nil {
			return err
		}
	}
	next := e.next(w.driver, time.Now())
	if e.gone || e.known && same(next, e.stored) {
		return nil
	}
	// Before the first write: who comes next has to know.
	if err := w.record(e); err != nil {
		return err
	}
	if err := w.apply(ctx, e, next); err != nil {
		return err
	}
	if !e.gone {
		w.written.Add(1)
		w.noteStored()
	}
	return nil
}

// noteStored notes that the cluster has stored an entry, and ends a pause that another worker began
// meanwhile.
func (w *Writer) noteStored() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.works = true
	if w.paused.IsZero() {
		return
	}
	w.paused = time.Time{}
	for uid := range w.entries {
		w.queue.Add(uid)
	}
}

func (w *Writer) record(e *entry) error {
	if e.recorded {
		return nil
	}
	err := w.ledger.add(e.ref)
	e.recorded = err == nil
	return err
}

// remove removes the entries of a claim that is not prepared.
func (w *Writer) remove(ctx context.Context, e *entry) error {
	if !e.recorded {
		return nil
	}
	if err := w.apply(ctx, e, nil); err != nil {
		return err
	}
	if !e.gone {
		w.written.Add(1)
	}
	err := w.ledger.remove(e.ref.UID)
	e.recorded = err != nil
	return err
}

// settle keeps what was found out about a claim, and says when to try again.
func (w *Writer) settle(ctx context.Context, uid types.UID, done *entry, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.entries[uid]
	e.known, e.stored, e.gone, e.recorded = done.known, done.stored, done.gone, done.recorded
	if err == nil {
		w.problem.Log(ctx, nil, "", "The status of claims can be written")
		w.queue.Forget(uid)
		switch {
		case e.wanted != nil:
			e.recheck = time.Now().Add(w.recheckInterval)
			w.queue.AddAfter(uid, w.recheckInterval)
		case !e.recorded:
			delete(w.entries, uid)
		}
		return
	}
	w.failed.Add(1)
	pause := w.pauseFor(err)
	if pause == 0 {
		klog.FromContext(ctx).V(1).Info("Could not bring the status of a claim up to date, will try again", "claim", e.ref, "reason", err)
		w.queue.AddRateLimited(uid)
		return
	}
	w.problem.Log(ctx, err, "The status of claims is not written: everything else works. It is tried again later", "", "pause", pause)
	w.paused = time.Now().Add(pause)
	w.queue.AddAfter(uid, pause)
}

// pauseFor returns for how long no claim is to be tried. A cluster that has stored an entry
// before has trouble with this claim only. w.mu is held.
func (w *Writer) pauseFor(err error) time.Duration {
	switch {
	case errors.Is(err, errDropped):
		w.dropped.Add(1)
		if !w.works {
			return droppedPause
		}
	case isForbidden(err):
		w.forbidden.Add(1)
		if !w.works {
			return forbiddenPause
		}
	case apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err):
		// Something is not served that is older than the oldest version of Kubernetes that
		// the driver works with.
		if !w.works {
			return droppedPause
		}
	}
	return 0
}

// Claim is what there is to say about a prepared claim.
type Claim struct {
	Ref     claim.Ref
	Devices []Device
}
