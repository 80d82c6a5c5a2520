// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// burst is how many events of a series are written at once, and perSecond how many in the long run.
	burst, perSecond = 10, 1. / 300
	// maxWaiting is how much may wait to be done, and how much to be done again.
	maxWaiting = 1000
	// maxSeries is how many are known.
	maxSeries = 4096
	// requestTime bounds one request.
	requestTime = 10 * time.Second
	// eventTTL is for how long an API server keeps an event by default: what could not be written for as long is given up.
	eventTTL = time.Hour
)

// pauses are those between attempts to write an event.
var pauses = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 60, Cap: time.Minute}

// lane does one thing after the other, which is to write an event most of the time. client-go's correlator counts what is the
// same, and limits it: of the same reason, object and GPU ten, and then one in five minutes. Its broadcaster is not used: it
// drops what comes in bursts, gives up what is refused, lets everything wait for what cannot be written, and forgets who
// reports what it has combined.
type lane struct {
	client     kubernetes.Interface
	correlator *record.EventCorrelator
	// ready says that there is something to do.
	ready chan struct{}

	mu sync.Mutex
	// queues are by namespace, which take turns: one that has much to tell does not silence others. again counts what waits to
	// be done again.
	queues map[string][]func()
	turns  []string
	again  map[string]int
}

// startLane makes a lane that works until ctx ends.
func startLane(ctx context.Context, client kubernetes.Interface) *lane {
	l := &lane{
		client: client, ready: make(chan struct{}, 1), queues: map[string][]func(){}, again: map[string]int{},
		correlator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{
			BurstSize: burst, QPS: perSecond, SpamKeyFunc: series,
			// Nothing is combined: the limits do, and what is combined has a longer message and name, and no reporter.
			KeyFunc: func(e *corev1.Event) (aggregate, local string) { return series(e) + "\x00" + e.Message, "" },
		}),
	}
	go func() {
		for ctx.Err() == nil {
			if do := l.next(); do != nil {
				do()
				continue
			}
			select {
			case <-ctx.Done():
			case <-l.ready:
			}
		}
	}()
	return l
}

// newFilter limits series of events as a lane does.
func newFilter() *record.EventSourceObjectSpamFilter {
	return record.NewEventSourceObjectSpamFilter(maxSeries, burst, perSecond, clock.RealClock{}, series)
}

// series tells apart what has limits of its own.
func series(e *corev1.Event) string {
	about, subject := e.InvolvedObject, ""
	if strings.HasPrefix(e.Message, "GPU") {
		subject, _, _ = strings.Cut(e.Message, ": ")
	}
	return strings.Join([]string{about.Kind, about.Namespace, about.Name, string(about.UID), e.Type, e.Reason, subject}, "\x00")
}

// next takes what is to be done next, or nil.
func (l *lane) next() (do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.turns) == 0 {
		return nil
	}
	namespace := l.turns[0]
	queue := l.queues[namespace]
	do, l.queues[namespace], l.turns = queue[0], queue[1:], l.turns[1:]
	if len(queue) > 1 {
		l.turns = append(l.turns, namespace)
	} else {
		delete(l.queues, namespace)
	}
	return do
}

// add does not block.
func (l *lane) add(ctx context.Context, namespace string, do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch waiting := len(l.queues[namespace]); {
	case waiting >= maxWaiting:
		klog.FromContext(ctx).Error(nil, "Too many events wait, so that one is not written", "namespace", namespace)
		return
	case waiting == 0:
		l.turns = append(l.turns, namespace)
	}
	l.queues[namespace] = append(l.queues[namespace], do)
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// later does something again, after a pause. The more of the namespace waits, the longer that is: at most one a second is done
// again.
func (l *lane) later(ctx context.Context, namespace string, pauses *wait.Backoff, do func()) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.again[namespace] >= maxWaiting {
		return false
	}
	l.again[namespace]++
	time.AfterFunc(max(pauses.Step(), time.Duration(l.again[namespace])*time.Second), func() {
		l.mu.Lock()
		if l.again[namespace]--; l.again[namespace] == 0 {
			delete(l.again, namespace)
		}
		l.mu.Unlock()
		l.add(ctx, namespace, do)
	})
	return true
}

// tell writes an event, unless the limits are against it. It is called by what was added.
func (l *lane) tell(ctx context.Context, e *corev1.Event) {
	found, err := l.correlator.EventCorrelate(e)
	if err != nil || found.Skip {
		return
	}
	l.write(ctx, found, pauses)
}

// write writes an event, again and again if it has to.
func (l *lane) write(ctx context.Context, e *record.EventCorrelateResult, pauses wait.Backoff) {
	stored, err := l.request(ctx, e)
	switch {
	case err == nil:
		l.correlator.UpdateState(stored)
		return
	case !isFinal(err) && time.Since(e.Event.LastTimestamp.Time) < eventTTL && l.later(ctx, e.Event.Namespace, &pauses, func() { l.write(ctx, e, pauses) }):
		return
	}
	klog.FromContext(ctx).Error(err, "Could not write an event", "about", e.Event.InvolvedObject, "reason", e.Event.Reason, "message", e.Event.Message)
}

// request makes the event, or counts one that is there.
func (l *lane) request(ctx context.Context, e *record.EventCorrelateResult) (stored *corev1.Event, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	events := l.client.CoreV1().Events(e.Event.Namespace)
	if e.Event.Count > 1 {
		stored, err = events.Patch(ctx, e.Event.Name, types.StrategicMergePatchType, e.Patch, metav1.PatchOptions{})
		if !apierrors.IsNotFound(err) {
			return stored, err
		}
	}
	e.Event.ResourceVersion = "" // of one that was there
	stored, err = events.Create(ctx, e.Event, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return e.Event, nil // a request before had no answer
	}
	return stored, err
}

// isFinal reports whether the API server will answer the same again. Permissions may come back, as during an upgrade.
func isFinal(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	switch code := status.Status().Code; {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), strings.Contains(err.Error(), "exceeded quota"):
		return true
	case apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		return false // something else answers for the API server
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err), apierrors.IsTooManyRequests(err):
		return false
	default:
		return code >= 400 && code < 500
	}
}
