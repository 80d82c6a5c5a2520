// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"math/rand/v2"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	recordutil "k8s.io/client-go/tools/record/util"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/quote"
)

// maxMessage is how long a message may be, in bytes.
const maxMessage = 1024

// together is how many events about claims are told together.
const together = 32

// Options are all mandatory.
type Options struct {
	// Component is the reporter, NodeName the instance of it.
	Component, NodeName string
	// Node and Users are the clients for events of the node, and for those of claims and pods. Each has a budget of its own.
	Node, Users kubernetes.Interface
	// Alarms are the reasons of events that users of GPUs do not cause.
	Alarms []string
	// Claim reads a claim, in bounded time; there is none if it is nil.
	Claim func(ctx context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error)
}

// Recorder writes events. Users of a node cause events, and may cause many: alarms, other events of the node, and those of
// claims and pods do not wait for each other.
type Recorder struct {
	options             Options
	alarms, node, users *lane
	// lookUps limits how often claims are read.
	lookUps *record.EventSourceObjectSpamFilter
}

// New makes a Recorder, which works until ctx ends.
func New(ctx context.Context, o Options) *Recorder {
	return &Recorder{
		options: o, alarms: startLane(ctx, o.Node), node: startLane(ctx, o.Node), users: startLane(ctx, o.Users), lookUps: newFilter(),
	}
}

// Tell writes events. Those about claims of a namespace are told together: a pod hears once what is the same for several of
// its claims.
func (r *Recorder) Tell(ctx context.Context, all ...Event) {
	ctx = context.WithoutCancel(ctx) // who tells does not wait
	ofClaims := map[string][]Event{}
	for _, e := range all {
		switch {
		case e.Claim.Namespace == "" || e.Claim.Name == "":
			r.tellNode(ctx, &e)
		case !r.lookUps.Filter(r.event(aboutClaim(e.Claim), &e, e.Message())):
			ofClaims[e.Claim.Namespace] = append(ofClaims[e.Claim.Namespace], e)
		}
	}
	for namespace, ofNamespace := range ofClaims {
		for some := range slices.Chunk(ofNamespace, together) {
			r.tellUsers(ctx, namespace, some)
		}
	}
}

// tellNode writes an event about the node, or about a claim whose name is not known.
func (r *Recorder) tellNode(ctx context.Context, e *Event) {
	message, lane := e.Message(), r.node
	if e.Claim.UID != "" {
		message = "Claim with UID " + quote.Name(e.Claim.UID) + ": " + message
	}
	if slices.Contains(r.options.Alarms, e.Reason) {
		lane = r.alarms
	}
	event := r.event(r.aboutNode(), e, message)
	lane.add(ctx, event.Namespace, func() { lane.tell(ctx, event) })
}

// Warn tells that something has happened to a claim.
func (r *Recorder) Warn(ctx context.Context, ref claim.Ref, reason, message string) {
	r.Tell(ctx, Event{Claim: ref, Reason: reason, Text: message})
}

// aboutNode has the name as UID too, as the kubelet has it: kubectl finds both.
func (r *Recorder) aboutNode() corev1.ObjectReference {
	name := r.options.NodeName
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

func aboutClaim(ref claim.Ref) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
		Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID,
	}
}

func (r *Recorder) event(about corev1.ObjectReference, e *Event, message string) *corev1.Event {
	now, o := metav1.Now(), &r.options
	event := &corev1.Event{
		InvolvedObject: about, Type: e.eventType(), Reason: e.Reason, Message: quote.Line(message, maxMessage), Count: 1,
		Source: corev1.EventSource{Component: o.Component, Host: o.NodeName}, ReportingController: o.Component, ReportingInstance: o.NodeName,
		FirstTimestamp: now, LastTimestamp: now,
	}
	event.Namespace = about.Namespace
	if event.Namespace == "" {
		event.Namespace = metav1.NamespaceDefault
	}
	// Nobody can make it before.
	event.Name = recordutil.GenerateEventName(about.Name, rand.Int64()) //nolint:gosec // no secret
	return event
}
