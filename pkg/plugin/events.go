// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
)

// maxEventMessage is how long a message may be, in bytes.
const maxEventMessage = 1024

// eventBurst is how many events one object may get at once. By default a recorder
// drops what comes after 25, which a node with 16 divided GPUs exceeds.
const eventBurst = 256

// Events writes events about claims and about the node. It queues them and never
// blocks; what the API server does not accept after some attempts is logged and
// lost.
//
// Events that report the same, see eventKey, become one with a count. The newer
// recorder of client-go counts events with the same reason as one, whatever they
// say: of two GPUs that are lost, one would never be named.
type Events struct {
	recorder record.EventRecorderLogger
	nodeName string
}

var _ claim.Events = (*Events)(nil)

// NewEvents makes Events that work until ctx ends. The component is the reporter.
func NewEvents(ctx context.Context, client kubernetes.Interface, component, nodeName string) *Events {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{
		BurstSize: eventBurst,
		// From the first one on, events with the same key are one.
		KeyFunc: eventKey, MaxEvents: 1, MessageFunc: func(e *corev1.Event) string { return e.Message },
	}))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	source := corev1.EventSource{Component: component, Host: nodeName}
	return &Events{recorder: broadcaster.NewRecorder(scheme.Scheme, source), nodeName: nodeName}
}

// Warn makes an event of type Warning, about the claim where its name is known and
// about the node otherwise. The zero Ref is the node.
func (e *Events) Warn(ctx context.Context, ref claim.Ref, reason, message string) {
	about := &corev1.ObjectReference{
		APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim",
		Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID,
	}
	if ref.Namespace == "" || ref.Name == "" {
		// The kubelet uses the name as UID too, kubectl finds both.
		about = &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.nodeName, UID: types.UID(e.nodeName)}
		if ref.UID != "" {
			message = fmt.Sprintf("Claim with UID %s: %s", ref.UID, message)
		}
	}
	if len(message) > maxEventMessage {
		message = strings.ToValidUTF8(message[:maxEventMessage-len("...")], "") + "..."
	}
	e.recorder.WithLogger(klog.FromContext(ctx)).Event(about, corev1.EventTypeWarning, reason, message)
}

// noEvents discards events.
type noEvents struct{}

func (noEvents) Warn(context.Context, claim.Ref, string, string) {}
