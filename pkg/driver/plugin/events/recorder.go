// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	recordutil "k8s.io/client-go/tools/record/util"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/answer"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// maxMessage is how long a message may be, in bytes.
	maxMessage = 1024
	// burst is how many events of a series are written at once, and perSecond how many in the long run.
	burst, perSecond = 10, 1. / 300
	// retryPause is the one after a failure: client-go tries twelve times, which is more than five minutes.
	retryPause = 30 * time.Second
	// tooLate is the age of an event after which it is tried only once, as the others of its queue have to wait for it.
	tooLate = 10 * time.Minute
	// maxQueues is how many queues may be open for good. Each has some goroutines and 64 KiB. Where there are more, those
	// are closed that were silent for so long that nothing waits in them.
	maxQueues = 100
)

// limits are for each queue. Events are not aggregated: aggregation would lengthen their messages, and the limits are enough.
var limits = record.CorrelatorOptions{
	BurstSize: burst, QPS: perSecond, SpamKeyFunc: series,
	KeyFunc: func(e *corev1.Event) (aggregate, local string) { return series(e) + "\x00" + e.Message, "" },
}

// Recorder writes events with client-go's recorders. Users of a node cause events, and may cause many. So each namespace, and each reason
// of events of the node, has a queue of its own: many events in one, or events that are refused, do not hold up the other queues.
type Recorder struct {
	ctx context.Context
	// source is the reporter, and its node.
	source corev1.EventSource
	// node and users are the clients for events of the node, and for those of claims and pods. Each has a budget of its own, for which
	// requests wait, and a limit for the time of a request.
	node, users kubernetes.Interface
	// failures counts attempts to write an event that failed.
	failures atomic.Uint64

	mu sync.Mutex
	// queues are by namespace and by reason. No namespace has the name of a reason, which has capitals.
	queues map[string]*queue
}

// queue writes its events itself, with one of the recorder's clients.
type queue struct {
	record.EventBroadcaster
	record.EventRecorder
	recorder *Recorder
	client   kubernetes.Interface
	used     time.Time
}

// New makes a Recorder for a component on a node, which works until ctx ends, with a client for events of the node and one for those of its
// users.
func New(ctx context.Context, component, nodeName string, node, users kubernetes.Interface) *Recorder {
	source := corev1.EventSource{Component: component, Host: nodeName}
	return &Recorder{ctx: ctx, source: source, node: node, users: users, queues: map[string]*queue{}}
}

// queue returns the queue with a name.
func (r *Recorder) queue(name string, client kubernetes.Interface) *queue {
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.queues[name]
	if q == nil {
		if len(r.queues) >= maxQueues {
			r.closeSilent()
		}
		q = &queue{recorder: r, client: client}
		pause := record.WithSleepDuration(retryPause)
		q.EventBroadcaster = record.NewBroadcaster(record.WithContext(r.ctx), pause, record.WithCorrelatorOptions(limits))
		q.EventRecorder = q.NewRecorder(scheme.Scheme, r.source)
		q.StartRecordingToSink(q)
		r.queues[name] = q
	}
	q.used = time.Now()
	return q
}

func (r *Recorder) closeSilent() {
	for name, q := range r.queues {
		if time.Since(q.used) > tooLate {
			q.Shutdown() // which gives up what waits
			delete(r.queues, name)
		}
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

// Warn writes the event that something has happened to a claim.
func (r *Recorder) Warn(ctx context.Context, ref claim.Ref, reason, message string) {
	r.Tell(ctx, Event{Claim: ref, Reason: reason, Text: message})
}

// Tell writes events. Those about claims go to the pods that use them, too.
func (r *Recorder) Tell(_ context.Context, all ...Event) {
	for i := range all {
		e := &all[i]
		if e.Claim.Namespace == "" || e.Claim.Name == "" {
			// The node has its name as UID too, as the kubelet has it: kubectl finds both.
			about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.source.Host, UID: types.UID(r.source.Host)}
			r.queue(e.Reason, r.node).Event(about, e.eventType(), e.Reason, quote.Line(e.Message(), maxMessage))
			continue
		}
		about := &corev1.ObjectReference{
			APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
			Namespace: e.Claim.Namespace, Name: e.Claim.Name, UID: e.Claim.UID,
		}
		text := tenant.Text(e.Message(), e.Claim.Namespace, e.Claim.UID, maxMessage)
		r.queue(e.Claim.Namespace, r.users).Event(about, e.eventType(), e.Reason, text)
	}
}

// Create gives the event a name that nobody can know before, and take.
func (q *queue) Create(e *corev1.Event) (*corev1.Event, error) {
	e.Name = recordutil.GenerateEventName(e.InvolvedObject.Name, rand.Int64()) //nolint:gosec // no secret
	return q.write(e, func(events typedcore.EventInterface) (*corev1.Event, error) {
		return events.Create(q.recorder.ctx, e, metav1.CreateOptions{})
	})
}

// Patch counts an event that is there.
func (q *queue) Patch(e *corev1.Event, data []byte) (*corev1.Event, error) {
	return q.write(e, func(events typedcore.EventInterface) (*corev1.Event, error) {
		return events.Patch(q.recorder.ctx, e.Name, types.StrategicMergePatchType, data, metav1.PatchOptions{})
	})
}

// Update is for the interface: broadcasters patch.
func (q *queue) Update(e *corev1.Event) (*corev1.Event, error) { return q.Create(e) }

// write also tells the pods for which a claim is reserved. Whatever the API server answers is repeated: rights come back, as during an
// upgrade, and something else may have answered for it. The broadcaster gives up what has a status, so that this is hidden from it.
func (q *queue) write(e *corev1.Event, do func(typedcore.EventInterface) (*corev1.Event, error)) (stored *corev1.Event, err error) {
	users, err := q.users(&e.InvolvedObject)
	if err == nil {
		stored, err = do(q.client.CoreV1().Events(e.Namespace))
	}
	if err != nil {
		q.recorder.failures.Add(1)
		if answer.IsMissing(err) || time.Since(e.LastTimestamp.Time) > tooLate {
			return nil, err
		}
		return nil, fmt.Errorf("write an event: %w", err)
	}
	for _, user := range users {
		if user.APIGroup == "" && user.Resource == "pods" {
			pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: e.Namespace, Name: user.Name, UID: user.UID}
			q.Event(pod, e.Type, e.Reason, quote.Line("Claim "+quote.Name(e.InvolvedObject.Name)+": "+e.Message, maxMessage))
		}
	}
	return stored, nil
}

// users are those of a claim. Nothing else has users.
func (q *queue) users(about *corev1.ObjectReference) ([]resourceapi.ResourceClaimConsumerReference, error) {
	if about.Kind != "ResourceClaim" {
		return nil, nil
	}
	ref := claim.Ref{Namespace: about.Namespace, Name: about.Name, UID: about.UID}
	found, err := answer.Claim(q.recorder.ctx, q.client, ref, metav1.GetOptions{})
	if found == nil {
		return nil, err
	}
	return found.Status.ReservedFor, nil
}
