// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

const (
	// checkInterval is how long the node is believed to have its labels, less up to
	// checkJitter: somebody may have changed them.
	checkInterval, checkJitter = 10 * time.Minute, 2 * time.Minute
	// retryInterval is the pause after a failure.
	retryInterval = time.Minute
	// requestTime bounds one request.
	requestTime = 10 * time.Second
)

// Mode says what becomes of the labels.
type Mode string

// Values of Mode.
const (
	// Never leaves the node alone.
	Never Mode = "Never"
	// Write keeps the labels on the node.
	Write Mode = "Write"
	// Remove removes those that were written.
	Remove Mode = "Remove"
)

// Modes are all values.
var Modes = []Mode{Never, Write, Remove}

// Options are all mandatory.
type Options struct {
	NodeName string
	// Client has a budget of its own: nothing that pods wait for is to wait for this.
	Client kubernetes.Interface
	// Mode is Write or Remove.
	Mode Mode
	// Warn tells that others have written labels with other values.
	Warn func(ctx context.Context, message string)
}

// Writer brings the labels of the node to what Set was told last. It writes by server-side
// apply: the API server knows which labels are this driver's, also those of earlier plugins,
// and refuses to overwrite those of others.
type Writer struct {
	options Options
	changed loop.Trigger

	mu sync.Mutex
	// wanted is nil as long as it is not known which GPUs there are.
	wanted map[string]string

	problem logchange.Problem
	foreign logchange.Value[string]
}

// New makes a Writer, which does nothing before Run.
func New(o Options) *Writer {
	w := &Writer{options: o, changed: loop.NewTrigger()}
	if o.Mode == Remove {
		w.wanted = map[string]string{}
	}
	return w
}

// Set takes the GPUs that the node offers. It does not block.
func (w *Writer) Set(gpus []*gpu.GPU) {
	if w.options.Mode != Write {
		return
	}
	labels := Of(gpus)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wanted != nil && maps.Equal(w.wanted, labels) {
		return
	}
	w.wanted = labels
	w.changed.Fire()
}

// Check has the labels of the node read: they may be other ones now. It does not block.
func (w *Writer) Check() { w.changed.Fire() }

// Run works until ctx ends. The labels stay then.
func (w *Writer) Run(ctx context.Context) {
	for ctx.Err() == nil {
		pause := checkInterval - rand.N(checkJitter) //nolint:gosec // no secret
		err := w.update(ctx)
		if ctx.Err() != nil {
			return
		}
		w.problem.Log(ctx, err, "The labels of the node are not up to date, will retry", "The labels of the node are up to date again")
		if err != nil {
			pause = retryInterval
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-w.changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// update writes if the node has not what it is to have.
func (w *Writer) update(ctx context.Context) error {
	w.mu.Lock()
	wanted := maps.Clone(w.wanted)
	w.mu.Unlock()
	if wanted == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	nodes := w.options.Client.CoreV1().Nodes()
	// The API server's cache is good enough: to write what is there changes nothing.
	node, err := nodes.Get(ctx, w.options.NodeName, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return fmt.Errorf("read the node: %w", err)
	}
	by, err := writers(node)
	if err != nil {
		return err
	}
	own := maps.Clone(node.Labels)
	maps.DeleteFunc(own, func(key, _ string) bool { return by[key] != manager })
	w.reportForeign(ctx, node, by, wanted)
	maps.DeleteFunc(wanted, func(key, _ string) bool {
		_, there := node.Labels[key]
		return there && by[key] != manager
	})
	if maps.Equal(own, wanted) {
		return nil
	}
	// The UID keeps a node of the same name from getting labels of this one.
	apply := applycorev1.Node(node.Name).WithUID(node.UID).WithLabels(wanted)
	if _, err := nodes.Apply(ctx, apply, metav1.ApplyOptions{FieldManager: manager}); err != nil {
		return fmt.Errorf("write labels of the node: %w", err)
	}
	klog.FromContext(ctx).Info("Wrote labels of the node", "labels", wanted, "before", own)
	return nil
}

// reportForeign tells which labels of others have other values. They stay as they are.
func (w *Writer) reportForeign(ctx context.Context, node *corev1.Node, by, wanted map[string]string) {
	var differ []string
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		value, there := node.Labels[key]
		if !there || by[key] == manager || value == wanted[key] {
			continue
		}
		differ = append(differ, fmt.Sprintf("%s=%s of %s instead of %s", key, value, by[key], wanted[key]))
	}
	text := strings.Join(differ, ", ")
	if !w.foreign.Set(text) || text == "" {
		return
	}
	message := "The node has labels that others wrote, which stay as they are: " + text +
		". Set kubeletPlugin.nodeLabels to Never where GPU feature discovery runs, or remove the labels if it runs no more."
	klog.FromContext(ctx).Info(message)
	w.options.Warn(ctx, message)
}
