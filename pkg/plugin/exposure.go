// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/exposure"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// Reasons of events about the node.
const (
	reasonExposed    = "GPUsWithoutClaims"
	reasonNotExposed = "GPUsOnlyWithClaims"
)

// ExposureCheck finds out whether containers without a claim can have GPUs. It is given the
// names of the handlers of the node's container runtime.
type ExposureCheck func(handlers []string) (exposure.Finding, error)

// exposureLoop reports whether containers without a claim can have GPUs, as long as that
// lasts. Nothing else depends on it.
type exposureLoop struct {
	check  ExposureCheck
	node   func(ctx context.Context) (*corev1.Node, error)
	events EventWriter

	handlers        []string
	open            logchange.Value[bool]
	unread, unknown logchange.Problem
}

// run looks now, with a node that may have been read already, and as often as an event
// that lasts is repeated.
func (l *exposureLoop) run(ctx context.Context, node *corev1.Node) {
	if l.check == nil {
		return
	}
	for {
		l.look(ctx, node)
		if !loop.Pause(ctx, time.Until(repeatAt(time.Now()))) {
			return
		}
		node = nil
	}
}

func (l *exposureLoop) look(ctx context.Context, node *corev1.Node) {
	err := l.readHandlers(ctx, node)
	l.unread.Log(ctx, err, "The handlers of the node's container runtime are not known, or as they were", "")
	finding, err := l.check(l.handlers)
	l.unknown.Log(ctx, err, "It is not known whether containers without a claim can have GPUs", "")
	if err != nil {
		return
	}
	logger := klog.FromContext(ctx)
	logger.V(4).Info("Looked for GPUs that containers have without a claim", "finding", finding)
	open, text := finding.Open(), sentences(finding.Text())
	changed := l.open.Set(open)
	switch {
	case open:
		l.events.Node(ctx, corev1.EventTypeWarning, reasonExposed, text)
	case changed:
		l.events.Node(ctx, corev1.EventTypeNormal, reasonNotExposed, text)
	}
	if changed {
		logger.Info(text)
	}
}

// readHandlers leaves what was read before where the node cannot be read.
func (l *exposureLoop) readHandlers(ctx context.Context, node *corev1.Node) error {
	if node == nil {
		var err error
		if node, err = l.node(ctx); err != nil {
			return fmt.Errorf("read the node: %w", err)
		}
	}
	l.handlers = RuntimeHandlers(node)
	return nil
}

// RuntimeHandlers are the names of the handlers of a node's container runtime, except for
// the default one, which has none.
func RuntimeHandlers(node *corev1.Node) []string {
	var names []string
	for _, handler := range node.Status.RuntimeHandlers {
		if handler.Name != "" {
			names = append(names, handler.Name)
		}
	}
	return names
}
