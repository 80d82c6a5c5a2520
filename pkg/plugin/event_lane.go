// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// laneLimits say how much a lane writes. Requests are paced by the client; these bound
// what is written in the long run.
type laneLimits struct {
	// workers is how many lines are written at the same time.
	workers int
	// line is the budget of each line, total that of all of them.
	line, total budget
}

// budget is how many requests may be made at once, and how often another one.
type budget struct {
	burst int
	every time.Duration
}

func (b budget) limiter() *rate.Limiter { return rate.NewLimiter(rate.Every(b.every), b.burst) }

var (
	// alarmLimits allow for all that can be said about the GPUs of a node: how often is
	// bounded by the series, of which there are four for each GPU.
	alarmLimits = laneLimits{workers: 1, line: budget{100, time.Second}, total: budget{100, time.Second}}
	nodeLimits  = laneLimits{workers: 1, line: budget{200, 10 * time.Second}, total: budget{200, 10 * time.Second}}
	// userLimits allow for a node full of pods that lose their devices, all of them in one
	// namespace, and for repeating that every 40 minutes.
	userLimits = laneLimits{workers: 4, line: budget{500, 10 * time.Second}, total: budget{1000, 4 * time.Second}}
	// seriesLimits are those of events with the same reason about the same object and GPU.
	seriesLimits = budget{10, 5 * time.Minute}
)

const (
	// maxWaiting is how many reports may wait in a lane.
	maxWaiting = 2000
	// eventTTL is for how long an API server keeps an event by default. An event that could
	// not be written for as long is given up, and what was written longer ago is forgotten.
	eventTTL = time.Hour
	// firstRetry and lastRetry are the pauses after a failure.
	firstRetry, lastRetry = time.Second, 30 * time.Second
)

// lane writes the reports of several lines: of each line one at a time, of some lines at
// the same time, and all lines in turn. What cannot be written does not hold up others: a
// report whose write fails waits, while new ones are tried at once.
//
// A report that exceeds a limit waits, too. What it repeats is counted and written with it,
// so that nothing is lost of what happens too often to be written each time.
type lane struct {
	store  *eventStore
	limits laneLimits
	// lookUp handles reports about the users of claims; nil in lanes without them.
	lookUp func(ctx context.Context, line string, batch []*report)
	queue  workqueue.TypedDelayingInterface[string]
	// pauses are those of lines whose reports failed.
	pauses workqueue.TypedRateLimiter[string]

	mu      sync.Mutex
	lines   map[string]*line
	total   *rate.Limiter
	waiting int
}

// newLane makes a lane that works after start.
func newLane(ctx context.Context, store *eventStore, limits laneLimits) *lane {
	l := &lane{
		store: store, limits: limits, lines: map[string]*line{}, total: limits.total.limiter(),
		queue:  workqueue.NewTypedDelayingQueue[string](),
		pauses: workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry),
	}
	context.AfterFunc(ctx, l.queue.ShutDown)
	return l
}

func (l *lane) start(ctx context.Context) {
	for range l.limits.workers {
		go l.work(ctx)
	}
}

// add queues reports, which are taken together. Of too many, the oldest of the line that has
// the most are dropped.
func (l *lane) add(ctx context.Context, name string, reports ...*report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lines[name] == nil {
		l.lines[name] = newLine(l.limits.line)
	}
	for _, r := range reports {
		l.waiting += l.lines[name].put(r)
	}
	for l.waiting > maxWaiting {
		dropped := l.longest().drop()
		l.waiting--
		klog.FromContext(ctx).Info("Too many events wait for the API server, dropping one",
			"about", klog.KRef(dropped.event.Namespace, dropped.event.InvolvedObject.Name), "reason", dropped.event.Reason, "message", dropped.event.Message)
	}
	l.queue.Add(name)
}

func (l *lane) longest() *line {
	var longest *line
	for _, one := range l.lines {
		if longest == nil || len(one.waiting) > len(longest.waiting) {
			longest = one
		}
	}
	return longest
}

func (l *lane) work(ctx context.Context) {
	for {
		name, ended := l.queue.Get()
		if ended {
			return
		}
		again, more := l.turn(ctx, name)
		l.queue.Done(name)
		if more {
			l.queue.AddAfter(name, again)
		}
	}
}

// turn writes one report of a line, or looks up the users of all claims that wait for it.
// It returns when the line wants its next turn, if it does.
func (l *lane) turn(ctx context.Context, name string) (again time.Duration, more bool) {
	batch, last, again, more := l.take(name)
	switch {
	case len(batch) == 0:
		return again, more
	case batch[0].users != nil:
		l.lookUp(ctx, name, batch)
	default:
		limited, cancel := context.WithTimeout(ctx, clusterTimeout)
		written, err := l.store.write(limited, batch[0].event, batch[0].times, last)
		cancel()
		l.settle(ctx, name, batch[0], written, err)
	}
	return 0, true
}

// take removes what can be written now from a line and pays for it. Without that, it
// returns when to ask again.
func (l *lane) take(name string) (batch []*report, last writtenEvent, again time.Duration, more bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from, now := l.lines[name], time.Now()
	if from == nil {
		return nil, last, 0, false
	}
	batch, again = from.take(now, l.total)
	l.waiting -= len(batch)
	if len(batch) > 0 {
		return batch, from.written[batch[0].name], 0, true
	}
	if from.forget(now) {
		delete(l.lines, name)
		l.pauses.Forget(name)
		return nil, last, 0, false
	}
	return nil, last, again, true
}

// settle says what came of a report that was taken. One that failed waits for its line's
// next try, which is soon when anything else of the line succeeds.
func (l *lane) settle(ctx context.Context, name string, r *report, written writtenEvent, err error) {
	if ctx.Err() != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	// A line does not end while it has its turn.
	from, now := l.lines[name], time.Now()
	final := err == nil || isFinal(err)
	if final {
		l.pauses.Forget(name)
		from.retryAt = now
	} else {
		from.retryAt = now.Add(wait.Jitter(l.pauses.When(name), 0.2))
	}
	switch {
	case err == nil && r.users == nil:
		from.written[r.name] = written
	case err == nil:
	case final, now.Sub(r.since) > eventTTL:
		klog.FromContext(ctx).Error(err, "Could not write an event", "about", r.event.InvolvedObject, "reason", r.event.Reason, "message", r.event.Message)
	default:
		r.failed = true
		l.waiting += from.putBack(r)
	}
}

// waits returns for how long there is no token; 0 means that there is one.
func waits(limiter *rate.Limiter, now time.Time) time.Duration {
	missing := 1 - limiter.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	// Never nothing, or a caller would ask again and again at the same time.
	return max(time.Millisecond, time.Duration(missing/float64(limiter.Limit())*float64(time.Second)))
}

// longestWait is the longest of some.
func longestWait(now time.Time, limiters ...*rate.Limiter) time.Duration {
	var longest time.Duration
	for _, limiter := range limiters {
		longest = max(longest, waits(limiter, now))
	}
	return longest
}

// indexOf returns where a list has the report with a name, or -1.
func indexOf(reports []*report, name string) int {
	return slices.IndexFunc(reports, func(r *report) bool { return r.name == name })
}
