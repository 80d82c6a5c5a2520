// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package call

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// DriverFiles is the queue of reads of the folder with the driver's libraries and programs, for [Queues.Of].
const DriverFiles = "files of the driver"

// Queues are those of a process. All methods may be called concurrently. A nil value has a queue
// of its own for every call, for programs that make a few calls and end.
type Queues struct {
	limit time.Duration

	mu     sync.Mutex
	queues map[[2]string]*Queue // by PCI address and what else they are for
	// out are the calls that have not returned, in the order in which they were made.
	out []*inFlight
}

// Queue is what calls wait in, in the order in which they come.
type Queue struct {
	// PCIAddress is empty for a queue that belongs to no GPU.
	PCIAddress string

	all    *Queues
	panics panics.Repeated

	// turn has one place, that of the call that is made.
	turn chan struct{}
	// current is the call that has not returned, or nil, and hung is closed when that is hung; all.mu guards them.
	current *inFlight
	hung    chan struct{}
}

// inFlight is a call that was made and may not have returned.
type inFlight struct {
	queue *Queue
	name  string
	since time.Time
	// unexplained is since when no older call is out that may keep it from returning.
	unexplained time.Time
	// done is closed when it has returned, and hung when the timer says that it is hung.
	done, hung chan struct{}
	timer      *time.Timer
	// abandoned says that nobody waits for it.
	abandoned bool
}

// New returns queues whose calls are hung after a limit, or DefaultLimit if it is 0.
func New(limit time.Duration) *Queues {
	return &Queues{limit: cmp.Or(limit, DefaultLimit), queues: map[[2]string]*Queue{}}
}

// Limit returns how long a call may take that is not hung.
func (q *Queues) Limit() time.Duration { return q.limit }

// GPU returns the queue of everything that is done with a GPU, by its PCI address.
func (q *Queues) GPU(pciAddress string) *Queue { return q.Of(pciAddress, "") }

// Of returns a queue for something else: about a GPU, if there is an address, whose other calls do not
// wait for it, or about none.
func (q *Queues) Of(pciAddress, what string) *Queue {
	if q == nil {
		return New(0).Of(pciAddress, what)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	key := [2]string{pciAddress, what}
	found := q.queues[key]
	if found == nil {
		found = &Queue{PCIAddress: pciAddress, all: q, turn: make(chan struct{}, 1), hung: make(chan struct{})}
		q.queues[key] = found
	}
	return found
}

// Pending returns the oldest call whose name has the prefix, for which nobody waits any more and which has not
// returned, or nil.
func (q *Queues) Pending(prefix string) *gpu.PendingError {
	return q.pending(func(c *inFlight) bool { return strings.HasPrefix(c.name, prefix) })
}

// Pending returns the call of this queue for which nobody waits any more and which has not returned, or nil. It may
// still take effect.
func (q *Queue) Pending() *gpu.PendingError {
	return q.all.pending(func(c *inFlight) bool { return c.queue == q })
}

func (q *Queues) pending(wanted func(*inFlight) bool) *gpu.PendingError {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.out, func(c *inFlight) bool { return c.abandoned && wanted(c) })
	if i < 0 {
		return nil
	}
	return q.out[i].pending(nil)
}

// Idle reports whether no call is out and none waits, so that one that takes its time is in nobody's way just now.
func (q *Queue) Idle() bool { return len(q.turn) == 0 }

// enter waits until it is the turn of a call, and then notes that it is made.
func (q *Queue) enter(ctx context.Context, name string) (*inFlight, error) {
	began := time.Now()
	for ctx.Err() == nil {
		q.all.mu.Lock()
		hung := q.hung
		q.all.mu.Unlock()
		select {
		case q.turn <- struct{}{}: // callers come in the order in which they began to wait
			if ctx.Err() == nil {
				return q.begin(name), nil
			}
			<-q.turn
		case <-ctx.Done():
			return nil, q.inVain(name, began, ctx.Err())
		case <-hung:
			if err := q.inVain(name, began, nil); err != nil {
				return nil, err
			}
		}
	}
	return nil, q.notAttempted(name, ctx.Err())
}

func (q *Queue) begin(name string) *inFlight {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	now, hung := time.Now(), q.hung
	q.current = &inFlight{
		queue: q, name: name, since: now, unexplained: now, done: make(chan struct{}), hung: hung,
		timer: time.AfterFunc(q.all.limit, func() { close(hung) }),
	}
	q.all.out = append(q.all.out, q.current)
	return q.current
}

// inVain returns the error of a caller who waits for its turn no longer because its time is over, which is the cause, or
// without one because the call ahead is hung. It is nil if that one has just returned.
func (q *Queue) inVain(name string, began time.Time, cause error) error {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	switch {
	case cause == nil && (q.current == nil || time.Since(q.current.since) < q.all.limit):
		return nil
	case cause == nil:
		return fmt.Errorf("%s is not attempted: %w", name, q.current.pending(nil))
	case q.current == nil:
		return q.notAttempted(name, cause)
	}
	return fmt.Errorf("%s is not attempted after %s in the queue: %w", name, time.Since(began).Round(time.Millisecond), q.current.pending(cause))
}

func (q *Queue) notAttempted(name string, err error) error {
	return &gpu.Error{Call: name, PCIAddress: q.PCIAddress, Text: "not attempted: " + err.Error(), Err: err}
}

// leave notes that a call has returned, and makes place for the next one.
func (q *Queue) leave(ctx context.Context, c *inFlight, err error) {
	q.all.mu.Lock()
	at := slices.Index(q.all.out, c)
	q.all.out = slices.Delete(q.all.out, at, at+1)
	for _, younger := range q.all.out[at:] {
		younger.unexplained = time.Now()
	}
	if !c.timer.Stop() {
		q.hung = make(chan struct{})
	}
	q.current = nil
	<-q.turn
	close(c.done)
	abandoned := c.abandoned
	q.all.mu.Unlock()
	if abandoned {
		klog.FromContext(ctx).Info("A call that nobody waited for any more has returned", "call", c.name, "pciAddress", q.PCIAddress,
			"took", time.Since(c.since).Round(time.Millisecond), "error", err)
	}
}

// abandon returns the error of a caller that does not wait any longer, or nil if the call has just returned.
func (q *Queue) abandon(c *inFlight, cause error) error {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	if q.current != c {
		return nil
	}
	c.abandoned = true
	return c.pending(cause)
}

// pending describes a call that is out, for those who stopped waiting for a cause, or never waited. It needs all.mu.
func (c *inFlight) pending(cause error) *gpu.PendingError {
	all, now := c.queue.all, time.Now()
	p := &gpu.PendingError{Call: c.name, PCIAddress: c.queue.PCIAddress, Since: c.since, Done: c.done, Err: cmp.Or(cause, gpu.ErrSlow)}
	slowAfter := min(SlowAfter, all.limit)
	if now.Sub(c.since) < slowAfter {
		return p
	}
	if older := c.behind(); older != nil {
		p.Behind = &gpu.PendingError{Call: older.name, PCIAddress: older.queue.PCIAddress, Since: older.since, Done: older.done}
	}
	p.Err = gpu.ErrSlow
	if now.Sub(c.since) >= all.limit && now.Sub(c.unexplained) >= slowAfter && p.Behind == nil {
		p.Err = gpu.ErrHung
	}
	if cause != nil {
		p.Err = fmt.Errorf("%w: %w", p.Err, cause)
	}
	return p
}

// behind returns the oldest call that may keep this one from returning, or nil.
func (c *inFlight) behind() *inFlight {
	for _, older := range c.queue.all.out {
		after := c.since.Sub(older.since)
		switch {
		case after <= moment, older.queue.PCIAddress != "" && older.queue.PCIAddress == c.queue.PCIAddress:
			return nil
		case after <= explains:
			return older
		}
	}
	return nil
}
