// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	recordutil "k8s.io/client-go/tools/record/util"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// maxMessage is how long a message may be, in bytes.
	maxMessage = 1024
	// burst is how many events of a series are written at once, and perSecond how many in the long run.
	burst, perSecond = 10, 1. / 300
	// maxWaiting is how much may wait in a lane.
	maxWaiting = 1000
	// firstPause and lastPause are those after failures of one thing, and againPerSecond is how many of a lane are tried again.
	firstPause, lastPause = time.Second, time.Minute
	againPerSecond        = 1
	// eventTTL is for how long an API server keeps an event by default: what could not be written for as long is given up.
	eventTTL = time.Hour
	// requestTime bounds one request.
	requestTime = 10 * time.Second
)

// Options are all mandatory.
type Options struct {
	// Component is the reporter, NodeName the instance of it.
	Component, NodeName string
	// Node and Users are the clients for events of the node, and for those of claims and pods. Each has a budget of its own.
	Node, Users kubernetes.Interface
	// Claim reads a claim, in bounded time; there is none if it is nil.
	Claim func(ctx context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error)
}

// Recorder writes events. Users of a node cause events, and may cause many: each namespace and each reason of events of the node
// has a lane of its own, and what fails is tried again for as long as anybody could read it. client-go's correlator counts what is
// the same, and limits it: of the same reason, object and GPU ten, and then one in five minutes. Its broadcaster is not used: it
// drops what comes in bursts, gives up what is refused, and lets everything wait for what cannot be written.
type Recorder struct {
	Options
	correlator *record.EventCorrelator
	// failures counts attempts to write an event that failed.
	failures atomic.Uint64
	// start starts a goroutine with the context of the recorder: who tells does not wait.
	start func(func(context.Context))

	mu sync.Mutex
	// lanes are those in which something waits. One does not wait for another, except for the budget of its client, which lets
	// them take turns: who has much to tell, or is refused, does not silence others.
	lanes map[string]*lane
}

// lane has one request at a time.
type lane struct {
	waiting int
	turn    chan struct{}
	again   *rate.Limiter
}

// New makes a Recorder, which works until ctx ends.
func New(ctx context.Context, o Options) *Recorder {
	return &Recorder{
		Options: o, lanes: map[string]*lane{}, start: func(do func(context.Context)) { go do(ctx) },
		correlator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{
			BurstSize: burst, QPS: perSecond, SpamKeyFunc: series,
			// Nothing is combined: the limits do, and what is combined has a longer message and a name that can be predicted.
			KeyFunc: func(e *corev1.Event) (aggregate, local string) { return series(e) + "\x00" + e.Message, "" },
		}),
	}
}

// series tells apart what has limits of its own.
func series(e *corev1.Event) string {
	about, subject := e.InvolvedObject, ""
	if strings.HasPrefix(e.Message, "GPU") {
		subject, _, _ = strings.Cut(e.Message, ": ")
	}
	return strings.Join([]string{about.Kind, about.Namespace, about.Name, string(about.UID), e.Type, e.Reason, subject}, "\x00")
}

// Failures returns how many attempts to write an event have failed.
func (r *Recorder) Failures() uint64 { return r.failures.Load() }

// Warn tells that something has happened to a claim.
func (r *Recorder) Warn(ctx context.Context, ref claim.Ref, reason, message string) {
	r.Tell(ctx, Event{Claim: ref, Reason: reason, Text: message})
}

// Tell writes events, and those about claims for the pods that use them, too.
func (r *Recorder) Tell(ctx context.Context, all ...Event) {
	for _, e := range all {
		namespace := e.Claim.Namespace
		if namespace == "" || e.Claim.Name == "" {
			r.write(ctx, r.Node, "reason "+e.Reason, &e)
		} else if r.write(ctx, r.Users, namespace, &e) {
			r.add(ctx, namespace, &e, func(ctx context.Context) error { return r.tellPods(ctx, e) })
		}
	}
}

// tellPods tells the pods for which the claim is reserved.
func (r *Recorder) tellPods(ctx context.Context, e Event) error {
	found, err := r.Claim(ctx, e.Claim)
	if err != nil || found == nil {
		return err
	}
	for _, user := range found.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			e.pod = corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: found.Namespace, Name: user.Name, UID: user.UID}
			r.write(ctx, r.Users, found.Namespace, &e)
		}
	}
	return nil
}

// add has something done in a lane, which is there as long as anything waits in it.
func (r *Recorder) add(ctx context.Context, name string, e *Event, do func(context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lanes[name]
	if l == nil {
		l = &lane{turn: make(chan struct{}, 1), again: rate.NewLimiter(againPerSecond, 1)}
		r.lanes[name] = l
	}
	if l.waiting >= maxWaiting {
		klog.FromContext(ctx).Error(nil, "Too many events wait, so that one is not written", "event", e.String())
		return
	}
	l.waiting++
	r.start(func(ctx context.Context) {
		if err := l.repeat(ctx, do); err != nil {
			klog.FromContext(ctx).Error(err, "Could not write an event", "event", e.String())
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if l.waiting--; l.waiting == 0 {
			delete(r.lanes, name)
		}
	})
}

// repeat does something until it succeeds or is too late.
func (l *lane) repeat(ctx context.Context, do func(context.Context) error) error {
	late := time.Now().Add(eventTTL)
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		l.turn <- struct{}{}
		err := do(ctx)
		<-l.turn
		if err == nil || !time.Now().Before(late) || !loop.Pause(ctx, max(pause, l.again.Reserve().Delay())) {
			return err
		}
	}
}

// event makes the object.
func (r *Recorder) event(e *Event) *corev1.Event {
	now, name := metav1.Now(), r.NodeName
	// The node has its name as UID too, as the kubelet has it: kubectl finds both.
	about := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
	if e.Claim.Name != "" {
		about = corev1.ObjectReference{
			APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
			Namespace: e.Claim.Namespace, Name: e.Claim.Name, UID: e.Claim.UID,
		}
	}
	about = cmp.Or(e.pod, about)
	message := quote.Line(e.Message(), maxMessage)
	if about.Namespace != "" {
		message = tenant.Text(e.Message(), e.Claim.Namespace, e.Claim.UID, maxMessage)
	}
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cmp.Or(about.Namespace, metav1.NamespaceDefault),
			Name:      recordutil.GenerateEventName(about.Name, rand.Int64()), //nolint:gosec // no secret, but nobody can make it before
		},
		InvolvedObject: about, Type: e.eventType(), Reason: e.Reason, Message: message, Count: 1,
		Source: corev1.EventSource{Component: r.Component, Host: name}, ReportingController: r.Component, ReportingInstance: name,
		FirstTimestamp: now, LastTimestamp: now,
	}
}

// write writes an event, unless the limits are against it. Whatever the API server answers is repeated: rights come back, as during an
// upgrade, and something else may have answered for it.
func (r *Recorder) write(ctx context.Context, client kubernetes.Interface, lane string, e *Event) (written bool) {
	found, err := r.correlator.EventCorrelate(r.event(e))
	if err != nil || found.Skip {
		return false
	}
	r.add(ctx, lane, e, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, requestTime)
		defer cancel()
		err := request(ctx, client.CoreV1().Events(found.Event.Namespace), found)
		if err != nil {
			r.failures.Add(1)
		}
		return err
	})
	return true
}

// request makes the event, or counts one that is there.
func request(ctx context.Context, events typedcore.EventInterface, e *record.EventCorrelateResult) error {
	if e.Event.Count > 1 {
		_, err := events.Patch(ctx, e.Event.Name, types.StrategicMergePatchType, e.Patch, metav1.PatchOptions{})
		if !apierrors.IsNotFound(err) {
			return err
		}
	}
	_, err := events.Create(ctx, e.Event, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil // a request before had no answer, or the next event was faster
	}
	return err
}
