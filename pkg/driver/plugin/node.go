// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/metawatch"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Reasons of events about the node.
const (
	// The annotation names no GPU.
	reasonCordonUnknown = "CordonedGPUUnknown"
	// Pods can have devices of the node by an extended resource, such as nvidia.com/gpu, or not.
	reasonExtendedOff = "ExtendedResourcesOff"
	reasonExtendedOn  = "ExtendedResourcesOn"
	// Others have written labels about GPUs.
	reasonForeignLabels = "NodeLabelsOfOthers"
)

// ownNode follows the Node of this machine: it is registered again, its kubelet is upgraded, others change its labels, and an
// administrator names GPUs to keep pods away from.
type ownNode struct {
	watch metawatch.Watch[*corev1.NodeList]
	name  string
	// changed is fired when something changes that matters here. Kubelets update their Node every few minutes.
	changed loop.Trigger
	// stop ends the driver.
	stop func(error)
	// now is nil until the Node was read, and has no UID while it is not in the cluster. It stays as it is while the API server does
	// not answer.
	now atomic.Pointer[corev1.Node]
}

func newOwnNode(client kubernetes.Interface, name string, changed loop.Trigger, stop func(error)) *ownNode {
	n := &ownNode{name: name, changed: changed, stop: stop}
	n.watch = metawatch.Watch[*corev1.NodeList]{
		Client: client.CoreV1().Nodes(), What: "the node", Selector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
		Changed: func(nodes map[types.UID]metav1.Object) {
			for _, one := range nodes {
				if node, is := one.(*corev1.Node); is {
					n.update(node)
					return
				}
			}
			n.notFound()
		},
	}
	return n
}

// update takes the node as it is now.
func (n *ownNode) update(node *corev1.Node) {
	before := n.now.Swap(node)
	if before == nil || before.UID != node.UID || before.Annotations[api.CordonAnnotation] != node.Annotations[api.CordonAnnotation] ||
		kubeletOf(before) != kubeletOf(node) || !maps.Equal(before.Labels, node.Labels) {
		n.changed.Fire()
	}
}

// notFound notes that the cluster has no such node. If it never had one, the name is wrong, and nothing published would be used.
func (n *ownNode) notFound() {
	if n.now.Load() == nil {
		n.stop(fmt.Errorf("the cluster has no node named %q: --node-name (NODE_NAME) must be the name of the Node object that this machine is", n.name))
		return
	}
	gone := n.now.Load().DeepCopy()
	gone.ObjectMeta = metav1.ObjectMeta{}
	n.update(gone)
}

func kubeletOf(node *corev1.Node) string { return node.Status.NodeInfo.KubeletVersion }

// cordon keeps pods away from the GPUs that an administrator has named, and returns events about names that are of no GPU.
func cordon(node *corev1.Node, gpus *gpu.Node) (conditions []device.Condition, unknown []events.Statement) {
	if node == nil {
		return nil, nil
	}
	named := api.CordonedGPUs(node.Annotations)
	for _, name := range named {
		address := strings.ToLower(name)
		if domain, rest, _ := strings.Cut(address, ":"); len(domain) == len("00000000") {
			address = strings.TrimPrefix(domain, "0000") + ":" + rest // as nvidia-smi prints it
		}
		if !gpus.Has(address) {
			unknown = append(unknown, events.Statement{Event: events.Event{Reason: reasonCordonUnknown, Text: fmt.Sprintf(
				"The annotation %s of the node has %q, which is no GPU of it: want PCI addresses, such as 0000:1b:00.0, separated by commas.", api.CordonAnnotation, name)}})
			continue
		}
		conditions = append(conditions, device.Condition{
			PCIAddress: address, Reason: device.Cordoned,
			Message: "an administrator keeps pods away from it with the annotation " + api.CordonAnnotation + " of the node; pods that run stay",
		})
	}
	return conditions, unknown
}

// aboutExtended is what pods have or have not.
const aboutExtended = "devices for extended resources of device classes, such as nvidia.com/gpu"

type kubeletKey string

// extendedResources reports whether the kubelet of a node gives pods devices by extended resources. One that is too old starts a pod that
// asks for one without the device that the scheduler has allocated for it. So its devices are published for claims only, and so are
// those of a kubelet whose version is not known, which is an error.
func extendedResources(node *corev1.Node) (known bool, err error) {
	if node == nil {
		return false, errors.New("the node has not been read yet")
	}
	return device.KnowsExtendedResources(kubeletOf(node))
}

// nodeStatements say what holds of the node.
func nodeStatements(o *observedState) (all []events.Statement) {
	for _, kind := range slices.Sorted(maps.Keys(o.neighbours.software)) {
		if f := o.neighbours.software[kind]; f.There {
			all = append(all, events.Statement{Key: kind, Event: events.Event{Reason: neighbourReasons[kind], Text: sentences(f.Text)}})
		}
	}
	if o.node == nil {
		return all
	}
	off := events.Event{Type: corev1.EventTypeNormal, Reason: reasonExtendedOff}
	switch knows, err := extendedResources(o.node); {
	case err != nil:
		off.Text = fmt.Sprintf("It is not known whether the kubelet gives pods %s, so that devices of this node are for claims only (%v).", aboutExtended, err)
	case !knows:
		off.Text = fmt.Sprintf("The kubelet %s would start pods that ask for %s, without a device, "+
			"so that devices of this node are for claims only. Upgrade the kubelet to 1.36 or later.", kubeletOf(o.node), aboutExtended)
	default:
		return all
	}
	return append(all, events.Statement{Key: kubeletKey(off.Text), Event: off})
}
