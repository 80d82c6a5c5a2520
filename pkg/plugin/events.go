// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/quote"
)

// maxEventMessage is how long a message may be, in bytes.
const maxEventMessage = 1024

// EventWriter writes events. None of its methods blocks.
type EventWriter interface {
	claim.Events
	// Node writes an event about the node; the type is corev1.EventTypeNormal or
	// corev1.EventTypeWarning.
	Node(ctx context.Context, eventType, reason, message string)
	// GPU writes an event about some GPUs of the node.
	GPU(ctx context.Context, pciAddresses []string, eventType, reason, message string)
	// ClaimEvents writes events about claims and about the pods that use them, one for each
	// text and pod.
	ClaimEvents(ctx context.Context, events []ClaimEvent)
}

// Events writes events about claims, their pods and the node. What the API server does not
// accept is tried again for an hour.
//
// Users of a node cause events, and may cause many. Therefore hardware alarms, other
// events of the node, and those of claims and pods are in lanes that do not wait for each
// other, and what happens again and again is written less and less often, see lane.
//
// Events that report the same, see eventKey, are one with a count, also those of the
// plugin that ran before or runs at the same time: their name follows from what they
// report. The recorders of client-go know only what they have written themselves, share
// one budget among all events of a node, and write one event after the other.
type Events struct {
	cluster             *Cluster
	component, nodeName string
	alarms, node, users *lane
}

var _ EventWriter = (*Events)(nil)

// NewEvents makes Events that work until ctx ends. The events of claims and pods are
// written through a client of their own, so that those of the node never wait for its
// budget. The component is the reporter.
func NewEvents(ctx context.Context, node, users kubernetes.Interface, component, nodeName string) *Events {
	e := &Events{cluster: NewCluster(users), component: component, nodeName: nodeName}
	e.alarms = newLane(ctx, &eventStore{node}, alarmLimits)
	e.node = newLane(ctx, &eventStore{node}, nodeLimits)
	e.users = newLane(ctx, &eventStore{users}, userLimits)
	e.users.lookUp = e.writeClaimEvents
	for _, l := range []*lane{e.alarms, e.node, e.users} {
		l.start(ctx)
	}
	return e
}

// Warn makes an event of type Warning, about the claim where its name is known and
// about the node otherwise. The zero Ref is the node.
func (e *Events) Warn(ctx context.Context, ref claim.Ref, reason, message string) {
	if ref.Namespace != "" && ref.Name != "" {
		e.users.add(ctx, ref.Namespace, e.newReport(aboutClaim(ref), corev1.EventTypeWarning, reason, message))
		return
	}
	if ref.UID != "" {
		message = fmt.Sprintf("Claim with UID %s: %s", quote.Name(ref.UID), message)
	}
	e.onNode(ctx, string(ref.UID), corev1.EventTypeWarning, reason, message)
}

// WarnUsers makes an event of type Warning about the claim and about each of its pods.
func (e *Events) WarnUsers(ctx context.Context, ref claim.Ref, reason, message string) {
	e.ClaimEvents(ctx, []ClaimEvent{{Claim: ref, Type: corev1.EventTypeWarning, Reason: reason, Text: message}})
}

// Node makes an event about the node.
func (e *Events) Node(ctx context.Context, eventType, reason, message string) {
	e.onNode(ctx, "", eventType, reason, message)
}

// GPU makes an event about the node.
func (e *Events) GPU(ctx context.Context, pciAddresses []string, eventType, reason, message string) {
	e.onNode(ctx, strings.Join(pciAddresses, ","), eventType, reason, message)
}

// onNode makes an event about the node and a part of it. Each part has a budget of its own.
func (e *Events) onNode(ctx context.Context, part, eventType, reason, message string) {
	r := e.newReport(e.aboutNode(), eventType, reason, message)
	r.series += part
	lane := e.node
	if slices.Contains(alarmReasons, reason) {
		lane = e.alarms
	}
	lane.add(ctx, e.nodeName, r)
}

// ClaimEvents makes events about claims and the pods that use them.
func (e *Events) ClaimEvents(ctx context.Context, events []ClaimEvent) {
	// Together, because a pod gets one event of what is the same for several claims.
	reports := map[string][]*report{}
	for _, n := range events {
		r := e.newReport(aboutClaim(n.Claim), n.Type, n.Reason, n.message(nil))
		// Not that event itself, but what leads to it and to those of the pods.
		r.name, r.series, r.users = "users of "+r.name, "users of "+r.series, &n
		reports[n.Claim.Namespace] = append(reports[n.Claim.Namespace], r)
	}
	for namespace, ofNamespace := range reports {
		e.users.add(ctx, namespace, ofNamespace...)
	}
}

// alarms are the reasons of conditions that users of GPUs do not cause by what MPS makes of
// their programs.
var alarms = slices.Concat(failures, []device.Reason{
	device.RecoveryRequired, device.XID, device.UncorrectedECC, device.RowRemapFailed, device.MemoryUnrepairable, device.FabricUnhealthy,
})

var alarmReasons = func() []string {
	var reasons []string
	for _, r := range alarms {
		reasons = append(reasons, eventReason(r), recoveryReason(r))
	}
	slices.Sort(reasons)
	return slices.Compact(reasons)
}()

// aboutNode has the name as UID too, as the kubelet does it: kubectl finds both.
func (e *Events) aboutNode() corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.nodeName, UID: types.UID(e.nodeName)}
}

func aboutClaim(ref claim.Ref) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
		Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID,
	}
}

// newReport makes a report that is not queued yet.
func (e *Events) newReport(about corev1.ObjectReference, eventType, reason, message string) *report {
	now := metav1.Now()
	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: about.Namespace},
		InvolvedObject: about, Type: eventType, Reason: reason, Message: quote.Line(message, maxEventMessage),
		Source:              corev1.EventSource{Component: e.component, Host: e.nodeName},
		ReportingController: e.component, ReportingInstance: e.nodeName,
		FirstTimestamp: now, LastTimestamp: now,
	}
	if event.Namespace == "" {
		event.Namespace = metav1.NamespaceDefault
	}
	event.Name = eventName(event)
	return &report{name: event.Name, series: seriesKey(event), event: event, times: 1, since: time.Now()}
}

// noEvents discards events.
type noEvents struct{}

func (noEvents) Warn(context.Context, claim.Ref, string, string)       {}
func (noEvents) WarnUsers(context.Context, claim.Ref, string, string)  {}
func (noEvents) Node(context.Context, string, string, string)          {}
func (noEvents) GPU(context.Context, []string, string, string, string) {}
func (noEvents) ClaimEvents(context.Context, []ClaimEvent)             {}
