// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
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
	// seen takes the node, which has no UID while it is not in the cluster. Kubelets write to it every few minutes.
	seen func(*metav1.PartialObjectMetadata)
	// cordoned is fired when other GPUs are.
	cordoned loop.Trigger

	mu sync.Mutex
	// annotation is that of the node. What was known stays while the API server does not answer.
	annotation string
}

func newOwnNode(client metadata.Interface, name string, board *events.Board, seen func(*metav1.PartialObjectMetadata), cordoned loop.Trigger) *ownNode {
	n := &ownNode{board: board, seen: seen, cordoned: cordoned}
	n.watch = metawatch.Watch{
		Client: client, Resource: corev1.SchemeGroupVersion.WithResource("nodes"),
		Selector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
		Listed: func(nodes []metav1.PartialObjectMetadata, _ time.Time) {
			node := &metav1.PartialObjectMetadata{}
			if len(nodes) > 0 {
				node = &nodes[0]
			}
			n.look(node)
		},
		Changed: func(node *metav1.PartialObjectMetadata, deleted bool) {
			if deleted {
				node = &metav1.PartialObjectMetadata{}
			}
			n.look(node)
		},
	}
	return n
}

// look takes the node as it is now.
func (n *ownNode) look(node *metav1.PartialObjectMetadata) {
	n.mu.Lock()
	before := n.annotation
	n.annotation = node.Annotations[CordonAnnotation]
	n.mu.Unlock()
	n.seen(node)
	if before != node.Annotations[CordonAnnotation] {
		n.cordoned.Fire()
	}
}

// conditions keep pods away from the GPUs that an administrator has named.
func (n *ownNode) conditions(ctx context.Context, known *gpu.Node, discovered bool) []device.Condition {
	n.mu.Lock()
	named := strings.FieldsFunc(n.annotation, func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) })
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
	if discovered { // before, there may be more
		n.board.Say(ctx, "cordon", unknown, nil)
	}
	return all
}
