// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
)

// report is something that people should read.
type report struct {
	// name identifies what is reported: two reports with the same are one event. Those
	// with the same series share a budget.
	name, series string
	event        *corev1.Event
	// users is set where claims' pods have to be looked up first.
	users *ClaimEvent
	// times is how often it was observed since it was written last, since when the last
	// time was.
	times int32
	since time.Time
	// failed means that the API server did not take it.
	failed bool
}

// absorb adds an older report with the same name.
func (r *report) absorb(older *report) {
	r.times += older.times
	r.event.FirstTimestamp = older.event.FirstTimestamp
	r.failed = r.failed || older.failed
}

// observedLike says that it was observed as often and when another report was.
func (r *report) observedLike(other *report) {
	r.times, r.since = other.times, other.since
	r.event.FirstTimestamp, r.event.LastTimestamp = other.event.FirstTimestamp, other.event.LastTimestamp
}

// line holds reports that are written one after the other: those of the node, or of one
// namespace. It is protected by its lane.
type line struct {
	waiting []*report
	budget  *rate.Limiter
	series  map[string]*rate.Limiter
	written map[string]writtenEvent
	// retryAt is when to try again what has failed. One such try tells about them all.
	retryAt time.Time
	// forgetAt is when to look for what need not be remembered.
	forgetAt time.Time
}

func newLine(b budget) *line {
	return &line{budget: b.limiter(), series: map[string]*rate.Limiter{}, written: map[string]writtenEvent{}}
}

// put adds a report at the end, or in the place of an older one. It returns how many more
// wait.
func (l *line) put(r *report) int {
	if at := indexOf(l.waiting, r.name); at >= 0 {
		r.absorb(l.waiting[at])
		l.waiting[at] = r
		return 0
	}
	l.waiting = append(l.waiting, r)
	return 1
}

// putBack adds a report that was taken, unless there is a newer one.
func (l *line) putBack(r *report) int {
	if at := indexOf(l.waiting, r.name); at >= 0 {
		l.waiting[at].absorb(r)
		return 0
	}
	l.waiting = append(l.waiting, r)
	return 1
}

// drop removes the oldest report.
func (l *line) drop() *report {
	oldest := l.waiting[0]
	l.waiting = l.waiting[1:]
	return oldest
}

// take removes the first report that may be written now; if the users of a claim have to
// be looked up for it, all such reports. If there is none, it returns when there may be.
func (l *line) take(now time.Time, total *rate.Limiter) (batch []*report, again time.Duration) {
	again = eventTTL
	var rest []*report
	for _, r := range l.waiting {
		if len(batch) > 0 && (batch[0].users == nil || r.users == nil) {
			rest = append(rest, r)
			continue
		}
		if delay := l.delay(r, now, total); delay > 0 {
			again = min(again, delay)
			rest = append(rest, r)
			continue
		}
		if !r.failed {
			for _, limiter := range []*rate.Limiter{l.series[r.series], l.budget, total} {
				limiter.AllowN(now, 1)
			}
		}
		batch = append(batch, r)
	}
	l.waiting = rest
	return batch, again
}

// delay returns for how long a report has to wait. One that failed has been paid for.
func (l *line) delay(r *report, now time.Time, total *rate.Limiter) time.Duration {
	if r.failed {
		return l.retryAt.Sub(now)
	}
	if l.series[r.series] == nil {
		l.series[r.series] = seriesLimits.limiter()
	}
	return longestWait(now, l.series[r.series], l.budget, total)
}

// forget removes what makes no difference any more, and reports whether nothing is left.
func (l *line) forget(now time.Time) (empty bool) {
	if now.Before(l.forgetAt) {
		return false
	}
	l.forgetAt = now.Add(eventTTL / 2)
	maps.DeleteFunc(l.written, func(_ string, w writtenEvent) bool { return now.Sub(w.at) > eventTTL })
	maps.DeleteFunc(l.series, func(_ string, limiter *rate.Limiter) bool { return waitsFull(limiter, now) })
	return len(l.waiting) == 0 && len(l.written) == 0 && len(l.series) == 0 && waitsFull(l.budget, now)
}

// waitsFull reports whether a limiter is like a new one.
func waitsFull(limiter *rate.Limiter, now time.Time) bool {
	return limiter.TokensAt(now) >= float64(limiter.Burst())
}
