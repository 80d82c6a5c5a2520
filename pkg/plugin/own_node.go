// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/metadata"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/internal/metawatch"
)

// CordonAnnotation of a Node has the PCI addresses of GPUs that pods are kept away from, separated by commas or spaces.
const CordonAnnotation = "partage.dev/cordoned-gpus"

// reasonCordonUnknown is the reason of an event.
const reasonCordonUnknown = "CordonedGPUUnknown"

// ownNode follows the metadata of this node: it is registered again, others change its labels, and an administrator names
// GPUs to keep pods away from.
type ownNode struct {
	watch metawatch.Watch
	board *events.Board
	// registered is called when the node is another object than before, relabelled when its labels may be other ones, too.
	registered, relabelled func()
	// cordoned is fired when other GPUs are.
	cordoned loop.Trigger

	mu sync.Mutex
	// node is nil as long as it is not known. What was known stays while the API server does not answer.
	node *metav1.PartialObjectMetadata
}

func newOwnNode(client metadata.Interface, name string, board *events.Board, registered, relabelled func(), cordoned loop.Trigger) *ownNode {
	n := &ownNode{board: board, registered: registered, relabelled: relabelled, cordoned: cordoned}
	n.watch = metawatch.Watch{
		Client: client, Resource: corev1.SchemeGroupVersion.WithResource("nodes"),
		Selector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
		Listed: func(nodes []metav1.PartialObjectMetadata, _ time.Time) {
			if len(nodes) > 0 {
				n.look(&nodes[0])
			}
		},
		Changed: func(node *metav1.PartialObjectMetadata, deleted bool) {
			if !deleted {
				n.look(node)
			}
		},
	}
	return n
}

// look takes the node as it is now. Kubelets write to it every few minutes.
func (n *ownNode) look(node *metav1.PartialObjectMetadata) {
	n.mu.Lock()
	was := n.node
	if was == nil {
		was = &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: node.UID, Labels: node.Labels}}
	}
	n.node = node
	n.mu.Unlock()
	if was.UID != node.UID {
		n.registered()
	}
	if was.UID != node.UID || !maps.Equal(was.Labels, node.Labels) {
		n.relabelled()
	}
	if was.Annotations[CordonAnnotation] != node.Annotations[CordonAnnotation] {
		n.cordoned.Fire()
	}
}

// conditions keep pods away from the GPUs that an administrator has named.
func (n *ownNode) conditions(ctx context.Context, known *gpu.Node) []device.Condition {
	n.mu.Lock()
	var named []string
	if n.node != nil {
		named = strings.FieldsFunc(n.node.Annotations[CordonAnnotation], func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) })
	}
	n.mu.Unlock()
	if known == nil {
		return nil
	}
	var all []device.Condition
	var unknown []events.Statement
	for _, name := range named {
		address := strings.ToLower(name)
		if domain, rest, _ := strings.Cut(address, ":"); len(domain) == len("00000000") {
			address = strings.TrimPrefix(domain, "0000") + ":" + rest // as nvidia-smi prints it
		}
		if !known.Has(address) {
			unknown = append(unknown, events.Statement{Event: events.Event{Reason: reasonCordonUnknown, Text: fmt.Sprintf(
				"The annotation %s of the node has %q, which is no GPU of it: want PCI addresses, such as 0000:1b:00.0, separated by commas.", CordonAnnotation, name)}})
			continue
		}
		all = append(all, device.Condition{
			PCIAddress: address, Reason: device.Cordoned,
			Message: "an administrator keeps pods away from it with the annotation " + CordonAnnotation + " of the node; pods that run stay",
		})
	}
	n.board.Say(ctx, "cordon", unknown, nil)
	return all
}
