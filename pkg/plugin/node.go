// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// checkNode fails when there is no node with the configured name: nothing that is
// published for it would ever be used. Any other failure is left to the
// retries of publishing, so that unpreparing works while the API server is away; there
// is no node then.
func (p *Plugin) checkNode(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timing.node)
	defer cancel()
	node, err := p.options.KubeClient.CoreV1().Nodes().Get(ctx, p.options.NodeName, metav1.GetOptions{})
	switch {
	case err == nil:
		return node, nil
	case apierrors.IsNotFound(err) && !notServed(err):
		return nil, fmt.Errorf("the cluster has no node named %q: --node-name (NODE_NAME) must be the name of the Node object that this machine is", p.options.NodeName)
	default:
		klog.FromContext(ctx).Info("Could not check that the node exists, going on", "node", p.options.NodeName, "err", err)
		return nil, nil //nolint:nilnil // not known
	}
}

// followNode reads the node, and then looks at it again and again. Nothing is offered before it was read: what it says of its
// kubelet and of cordoned GPUs is not known.
func (p *Plugin) followNode(ctx context.Context) {
	node, err := p.checkNode(ctx)
	for pause := time.Second; node == nil && err == nil && loop.Pause(ctx, wait.Jitter(pause, 0.5)); pause = min(pause*3/2, 20*time.Second) {
		node, err = p.checkNode(ctx)
	}
	switch {
	case err != nil:
		p.stop(err)
		return
	case node == nil:
		return
	}
	p.ownNode.look(&metav1.PartialObjectMetadata{ObjectMeta: node.ObjectMeta})
	p.kubelet.look(ctx, node)
	p.neighbours.run(ctx, node)
}

// nodeUnread is how long the API server may fail to answer before that is an error.
const nodeUnread = 30 * time.Minute

// readNode reads the node; the API server's cache is good enough.
func readNode(client kubernetes.Interface, name string, timeout time.Duration) func(context.Context) (*corev1.Node, error) {
	return func(ctx context.Context) (*corev1.Node, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{ResourceVersion: "0"})
	}
}
