// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
)

// DefaultCheckInterval is in what time the API server is asked about each prepared claim
// once. A cluster with 5,000 nodes and 56 claims on each gets 233 requests per second.
const DefaultCheckInterval = 20 * time.Minute

const (
	// doubtPause is the time between two questions that are asked besides the regular
	// ones, on average, and also between two about one claim. Where every node has doubts
	// all the time, the cluster above gets 67 more requests per second.
	doubtPause = 75 * time.Second
	// inquiryBurst is how many questions may be asked at once.
	inquiryBurst = 8
	// inquiryJitter is by which part of it the time between two questions about a claim
	// is longer or shorter.
	inquiryJitter = 0.1
	// retryFraction of the interval is the time until it is tried again to release an
	// orphan. It doubles each time, up to half of the interval.
	retryFraction  = 40
	retryDoublings = 5
	// recountFraction of the interval is how often new claims are looked for.
	recountFraction = 10
)

// errUnknown is why a claim is left alone.
var errUnknown = errors.New("it is not known which claims still exist")

// inquiries say when to ask the API server about which claim. Time is that since the
// machine started.
type inquiries struct {
	interval time.Duration
	// doubted is fired when a claim is to be asked about sooner.
	doubted chan struct{}

	mu     sync.Mutex
	budget *rate.Limiter
	// counted says that there was an update.
	counted bool
	claims  map[types.UID]*inquiry
}

// inquiry is what is known about asking about a claim.
type inquiry struct {
	due time.Duration
	// asked is when it was asked about last, or long ago.
	asked time.Duration
	// graceEnds says that it has to be asked about when it is due, and not before.
	graceEnds bool
	// failures is how often it could not be released.
	failures int
	// err is what came of it last.
	err error
}

func newInquiries(interval time.Duration) *inquiries {
	return &inquiries{
		interval: interval, doubted: make(chan struct{}, 1),
		budget: rate.NewLimiter(0, inquiryBurst), claims: map[types.UID]*inquiry{},
	}
}

// update takes the claims that there are. The first time, they have been there for any
// time: they are asked about one after the other during the interval, since on other
// nodes plugins may be starting too. Others have just been prepared.
func (q *inquiries) update(uids []types.UID, now time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	first := !q.counted
	q.counted = true
	known := make(map[types.UID]bool, len(uids))
	for _, uid := range uids {
		known[uid] = true
		if q.claims[uid] != nil {
			continue
		}
		wait := q.jittered(q.interval)
		if first {
			wait = time.Duration(rand.Float64() * float64(q.interval)) //nolint:gosec // no secret
		}
		q.claims[uid] = &inquiry{due: now + wait, asked: now - doubtPause}
	}
	maps.DeleteFunc(q.claims, func(uid types.UID, _ *inquiry) bool { return !known[uid] })
	q.budget.SetLimitAt(moment(now), rate.Limit(float64(len(q.claims))/q.interval.Seconds()+1/doubtPause.Seconds()))
}

// next returns the claim to ask about now, or the time until there may be one.
func (q *inquiries) next(now time.Duration) (types.UID, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	wait := q.interval / recountFraction
	var next types.UID
	for uid, i := range q.claims {
		if until := i.due - now; until < wait {
			next, wait = uid, until
		}
	}
	if wait > 0 {
		return "", wait
	}
	turn := q.budget.ReserveN(moment(now), 1)
	if wait := turn.DelayFrom(moment(now)); wait > 0 {
		turn.CancelAt(moment(now))
		return "", wait
	}
	return next, 0
}

// answered notes what came of asking about a claim: when to ask again, unless that is not
// known, or why there is no answer or the claim could not be released.
func (q *inquiries) answered(uid types.UID, now, again time.Duration, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := q.claims[uid]
	if i == nil {
		return
	}
	isOrphan := i.graceEnds
	i.asked, i.err, i.graceEnds = now, err, again > 0
	switch {
	case errors.Is(err, errUnknown) && isOrphan:
		i.due, i.graceEnds = now+min(q.interval, doubtPause), true
	case errors.Is(err, errUnknown):
		// An API server in trouble is asked no more often than any other. A claim that is
		// in the way is doubted again.
		i.failures, i.due = 0, now+q.jittered(q.interval)
	case err != nil:
		wait := min(q.interval/retryFraction<<min(i.failures, retryDoublings), q.interval/2)
		i.failures++
		i.due = now + q.jittered(wait)
	case again > 0:
		i.failures, i.due = 0, now+again
	default:
		i.failures, i.due = 0, now+q.jittered(q.interval)
	}
}

// doubt lets a claim be asked about soon. It never blocks.
func (q *inquiries) doubt(uid types.UID, now time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := q.claims[uid]
	if i == nil {
		i = &inquiry{due: now, asked: now - doubtPause}
		q.claims[uid] = i
	}
	if i.graceEnds {
		return // nothing can be done sooner
	}
	i.due = min(i.due, max(now, i.asked+doubtPause))
	select {
	case q.doubted <- struct{}{}:
	default:
	}
}

// problem is why claims could not be asked about or released.
func (q *inquiries) problem() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	var unknown error
	var errs []error
	for _, uid := range slices.Sorted(maps.Keys(q.claims)) {
		switch err := q.claims[uid].err; {
		case errors.Is(err, errUnknown):
			// It stands for all claims: usually they have the same.
			unknown = cmp.Or(unknown, err)
		case err != nil:
			errs = append(errs, err)
		}
	}
	return errors.Join(unknown, errors.Join(errs...))
}

func (q *inquiries) jittered(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (1 + inquiryJitter*(2*rand.Float64()-1))) //nolint:gosec // no secret
}

// moment is a time since the machine started as the budget takes it.
func moment(sinceStart time.Duration) time.Time { return time.Unix(0, 0).Add(sinceStart) }
