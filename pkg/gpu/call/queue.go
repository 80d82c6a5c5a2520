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

// DriverFiles is the queue of looks at the folder with the driver's libraries and programs, for [Queues.Of].
const DriverFiles = "files of the driver"

// Queues are those of a process. All methods may be called concurrently. A nil value has a queue
// of its own for every call, for programs that make a few calls and end.
type Queues struct {
	limit time.Duration

	mu     sync.Mutex
	queues map[key]*Queue
	// out are the calls that have not returned, in the order in which they were made.
	out []*made
}

type key struct{ pci, of string }

// Queue is what calls wait in, in the order in which they come.
type Queue struct {
	all    *Queues
	pci    string
	panics panics.Repeated

	// current is the call that has not returned, or nil, and waiting are those behind it; all.mu guards them.
	current *made
	waiting []*waiter
}

// made is a call that was made.
type made struct {
	queue *Queue
	name  string
	since time.Time
	// unexplained is since when no older call is out that may keep it from returning.
	unexplained time.Time
	done        chan struct{}
	// abandoned says that nobody waits for it.
	abandoned bool
}

type waiter struct {
	name string
	// turn has room for the call.
	turn chan *made
}

// New returns queues whose calls are hung after a limit, or DefaultLimit if it is 0.
func New(limit time.Duration) *Queues {
	return &Queues{limit: cmp.Or(limit, DefaultLimit), queues: map[key]*Queue{}}
}

// Limit returns how long a call may take that is not hung.
func (q *Queues) Limit() time.Duration {
	if q == nil {
		return DefaultLimit
	}
	return q.limit
}

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
	found := q.queues[key{pciAddress, what}]
	if found == nil {
		found = &Queue{all: q, pci: pciAddress}
		q.queues[key{pciAddress, what}] = found
	}
	return found
}

// Pending returns the oldest call whose name has the prefix, for which nobody waits any more and which has not
// returned, or nil.
func (q *Queues) Pending(prefix string) *gpu.PendingError {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, c := range q.out {
		if c.abandoned && strings.HasPrefix(c.name, prefix) {
			return c.pending(nil)
		}
	}
	return nil
}

// Pending returns the call of this queue for which nobody waits any more and which has not returned, or nil. It may
// still take effect.
func (q *Queue) Pending() *gpu.PendingError {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	if q.current == nil || !q.current.abandoned {
		return nil
	}
	return q.current.pending(nil)
}

// Limit returns how long a call may take that is not hung.
func (q *Queue) Limit() time.Duration { return q.all.limit }

// Idle reports whether no call is out and none waits, so that one that takes its time is in nobody's way just now.
func (q *Queue) Idle() bool {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	return q.current == nil
}

// PCIAddress is empty for a queue that belongs to no GPU.
func (q *Queue) PCIAddress() string { return q.pci }

// enter waits until it is the turn of a call, and then notes that it is made.
func (q *Queue) enter(ctx context.Context, name string) (*made, error) {
	if err := ctx.Err(); err != nil {
		return nil, notAttempted(q, name, err)
	}
	began := time.Now()
	q.all.mu.Lock()
	ahead := q.current
	if ahead == nil {
		defer q.all.mu.Unlock()
		return q.begin(name), nil
	}
	w := &waiter{name: name, turn: make(chan *made, 1)}
	q.waiting = append(q.waiting, w)
	q.all.mu.Unlock()
	for {
		hung := time.NewTimer(time.Until(ahead.since.Add(q.all.limit)))
		select {
		case c := <-w.turn:
			hung.Stop()
			return c, nil
		case <-ctx.Done():
			hung.Stop()
			return q.giveUp(w, ctx.Err(), began)
		case <-hung.C:
		}
		q.all.mu.Lock()
		before := ahead
		ahead = q.current // there is one: at least this call, if its turn has come
		q.all.mu.Unlock()
		if ahead == before {
			return q.giveUp(w, nil, began)
		}
	}
}

// begin needs all.mu and an empty place.
func (q *Queue) begin(name string) *made {
	now := time.Now()
	q.current = &made{queue: q, name: name, since: now, unexplained: now, done: make(chan struct{})}
	q.all.out = append(q.all.out, q.current)
	return q.current
}

// giveUp leaves the queue because the caller's time is over, which is the cause, or without one because the call ahead is
// hung. It returns the call if its turn has come meanwhile and there is time for it.
func (q *Queue) giveUp(w *waiter, cause error, began time.Time) (*made, error) {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	if i := slices.Index(q.waiting, w); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return nil, waitedInVain(w.name, time.Since(began), q.current.pending(cause), cause)
	}
	c := <-w.turn
	if cause == nil {
		return c, nil
	}
	q.end(c)
	return nil, notAttempted(q, w.name, cause)
}

// leave notes that a call has returned.
func (q *Queue) leave(ctx context.Context, c *made, err error) {
	q.all.mu.Lock()
	abandoned := c.abandoned
	q.end(c)
	q.all.mu.Unlock()
	if abandoned {
		klog.FromContext(ctx).Info("A call that nobody waited for any more has returned", "call", c.name, "pciAddress", q.pci,
			"took", time.Since(c.since).Round(time.Millisecond), "error", err)
	}
}

// end makes place for the next call. It needs all.mu.
func (q *Queue) end(c *made) {
	at := slices.Index(q.all.out, c)
	q.all.out = slices.Delete(q.all.out, at, at+1)
	for _, younger := range q.all.out[at:] {
		younger.unexplained = time.Now()
	}
	close(c.done)
	q.current = nil
	if len(q.waiting) > 0 {
		next := q.waiting[0]
		q.waiting = slices.Delete(q.waiting, 0, 1)
		next.turn <- q.begin(next.name) // has room
	}
}

// abandon returns the error of a caller that does not wait any longer, or nil if the call has just returned.
func (q *Queue) abandon(c *made, cause error) error {
	q.all.mu.Lock()
	defer q.all.mu.Unlock()
	if q.current != c {
		return nil
	}
	c.abandoned = true
	return c.pending(cause)
}

// pending describes a call that is out, for those who stopped waiting for a cause, or never waited. It needs all.mu.
func (c *made) pending(cause error) *gpu.PendingError {
	all, now := c.queue.all, time.Now()
	p := &gpu.PendingError{Call: c.name, PCIAddress: c.queue.pci, Since: c.since, Done: c.done, Err: cmp.Or(cause, gpu.ErrSlow)}
	slowAfter := min(SlowAfter, all.limit)
	if now.Sub(c.since) < slowAfter {
		return p
	}
	if older := c.behind(); older != nil {
		p.Behind = &gpu.PendingError{Call: older.name, PCIAddress: older.queue.pci, Since: older.since, Done: older.done}
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
func (c *made) behind() *made {
	for _, older := range c.queue.all.out {
		after := c.since.Sub(older.since)
		switch {
		case after <= moment, older.queue.pci != "" && older.queue.pci == c.queue.pci:
			return nil
		case after <= explains:
			return older
		}
	}
	return nil
}
