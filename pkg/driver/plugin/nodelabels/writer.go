// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nodelabels writes labels about GPUs to the node, with the names and values of
// NVIDIA's GPU feature discovery, for manifests that select nodes by them.
package nodelabels

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

const (
	// manager is this driver's name among those who write fields of objects.
	manager = "partage-node-labels"
	// retryInterval is the pause after a failure.
	retryInterval = time.Minute
)

// Mode says what becomes of the labels: Never leaves the node alone, Write keeps them on the node, and Remove removes
// those that were written.
type Mode string

// Values of Mode.
const (
	Never  Mode = "Never"
	Write  Mode = "Write"
	Remove Mode = "Remove"
)

// Modes are all values.
var Modes = []Mode{Never, Write, Remove}

// Options are all mandatory.
type Options struct {
	NodeName string
	// Client has a budget of its own, so that nothing that pods wait for waits for this, and a limit for the time of a request.
	Client kubernetes.Interface
	Mode   Mode
	// Say takes the message of an event about labels that others have written with other values, empty if there are none.
	Say func(ctx context.Context, message string)
}

// Writer keeps the labels of the node as Set was last called with. It writes by server-side
// apply: the API server knows which labels are this driver's, also those of earlier plugins,
// and refuses to overwrite those of others.
type Writer struct {
	Options
	changed loop.Trigger
	mu      sync.Mutex
	// now is how things are, as of this version of the node and of what was written since; done is how they were after the last write.
	now, done state
	version   string
	problem   logchange.Problem
}

// state decides whether something is to be written: wanted is nil as long as nothing is, and the UID empty while there is no node.
type state struct {
	uid            types.UID
	labels, wanted map[string]string
}

// New makes a Writer, which does nothing before Run.
func New(o Options) *Writer {
	return &Writer{Options: o, changed: loop.NewTrigger()}
}

// Set takes the node as it is now, and the GPUs that it offers, if they are known. It does not block. A call with the same values does not
// cut the pause after a failure short.
func (w *Writer) Set(node *corev1.Node, gpus []*gpu.GPU, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.now
	if node.ResourceVersion != w.version {
		w.version, now.uid, now.labels = node.ResourceVersion, node.UID, node.Labels
	}
	switch {
	case w.Mode == Remove:
		now.wanted = map[string]string{}
	case w.Mode == Write && known:
		now.wanted = Of(gpus)
	}
	if !reflect.DeepEqual(w.now, now) {
		w.now = now
		w.changed.Fire()
	}
}

// Run works until ctx ends. The labels stay then.
func (w *Writer) Run(ctx context.Context) {
	for ctx.Err() == nil {
		var again <-chan time.Time
		err := w.update(ctx)
		if err != nil {
			again = time.After(retryInterval)
		}
		if ctx.Err() == nil {
			w.problem.Log(ctx, err, "The labels of the node are not up to date, will retry", "The labels of the node are up to date again")
		}
		select {
		case <-ctx.Done():
		case <-w.changed:
		case <-again:
		}
	}
}

// update writes if something has changed since the last time. Labels that others have written with other values stay, with an event.
func (w *Writer) update(ctx context.Context) error {
	w.mu.Lock()
	now, version := w.now, w.version
	w.mu.Unlock()
	if now.wanted == nil || now.uid == "" || reflect.DeepEqual(now, w.done) {
		return nil
	}
	node, err := w.apply(ctx, now.uid, now.wanted)
	by := conflicts(err)
	if len(by) > 0 {
		own := maps.Clone(now.wanted)
		maps.DeleteFunc(own, func(key, _ string) bool { _, others := by[key]; return others })
		node, err = w.apply(ctx, now.uid, own)
	}
	if err != nil {
		return fmt.Errorf("write labels of the node: %w", err)
	}
	if !maps.Equal(node.Labels, now.labels) {
		klog.FromContext(ctx).Info("Wrote labels of the node", "labels", node.Labels, "before", now.labels)
	}
	now.labels = node.Labels
	w.done = now
	w.mu.Lock()
	if w.version == version {
		w.now = now // so that Set notices if a plugin that is being replaced writes the previous labels again
	} else {
		w.changed.Fire() // Set compared a node that was read during the write with the labels before it
	}
	w.mu.Unlock()
	w.Say(ctx, describe(now, by))
	return nil
}

func (w *Writer) apply(ctx context.Context, uid types.UID, labels map[string]string) (*corev1.Node, error) {
	// The UID keeps a node of the same name from getting labels of this one.
	return w.Client.CoreV1().Nodes().Apply(ctx, applycorev1.Node(w.NodeName).WithUID(uid).WithLabels(labels), metav1.ApplyOptions{FieldManager: manager})
}

// conflicts are the labels that others have written with other values, and who has.
func conflicts(err error) map[string]string {
	by := map[string]string{}
	var status apierrors.APIStatus
	if apierrors.IsConflict(err) && errors.As(err, &status) && status.Status().Details != nil {
		for _, cause := range status.Status().Details.Causes {
			if key, is := strings.CutPrefix(cause.Field, ".metadata.labels."); is {
				_, after, _ := strings.Cut(cause.Message, `"`) // conflict with "manager" using v1 at 2026-11-22T18:20:55Z
				by[key], _, _ = strings.Cut(after, `"`)
			}
		}
	}
	return by
}

// describe says what others have written with other values.
func describe(now state, by map[string]string) string {
	var differ []string
	for _, key := range slices.Sorted(maps.Keys(by)) {
		differ = append(differ, fmt.Sprintf("%s=%s of %s instead of %s", key, now.labels[key], by[key], now.wanted[key]))
	}
	if len(differ) == 0 {
		return ""
	}
	return "The node has labels that others wrote, which stay as they are: " + strings.Join(differ, ", ") +
		". Set kubeletPlugin.nodeLabels to Never where GPU feature discovery runs, or remove the labels if it runs no more."
}

// Labels of a node. GPU feature discovery has more: those that are missing here say what does
// not hold with Partage, such as how often a GPU is shared, or make NVIDIA's operator and
// device plugin start pods on the node.
const (
	Product      = "nvidia.com/gpu.product"
	Count        = "nvidia.com/gpu.count"
	Memory       = "nvidia.com/gpu.memory"
	Family       = "nvidia.com/gpu.family"
	ComputeMajor = "nvidia.com/gpu.compute.major"
	ComputeMinor = "nvidia.com/gpu.compute.minor"
)

// Of returns the labels for a node with these GPUs. Each is true of all of them: where GPUs
// differ in something, no label says it. Without GPUs there are none.
func Of(gpus []*gpu.GPU) map[string]string {
	if len(gpus) == 0 {
		return map[string]string{}
	}
	labels := of(gpus[0])
	for _, g := range gpus[1:] {
		other := of(g)
		for key, value := range labels {
			if other[key] != value {
				delete(labels, key)
			}
		}
	}
	labels[Count] = fmt.Sprint(len(gpus))
	return labels
}

// of returns the labels that describe one GPU.
func of(g *gpu.GPU) map[string]string {
	labels := map[string]string{
		Product: product(g.ProductName),
		Family:  strings.ReplaceAll(strings.ToLower(g.Architecture), " ", "-"),
	}
	if mebibytes := g.Resources.MemoryBytes >> 20; mebibytes > 0 {
		labels[Memory] = fmt.Sprint(mebibytes)
	}
	if g.ComputeCapability.Major > 0 {
		labels[ComputeMajor] = fmt.Sprint(g.ComputeCapability.Major)
		labels[ComputeMinor] = fmt.Sprint(g.ComputeCapability.Minor)
	}
	for key, value := range labels {
		if value == "" || len(validation.IsValidLabelValue(value)) > 0 {
			delete(labels, key)
		}
	}
	return labels
}

var notInProduct = regexp.MustCompile(`[^A-Za-z0-9_. -]`)

// product makes a label's value of a product's name, as GPU feature discovery does.
func product(name string) string {
	return strings.Join(strings.Fields(notInProduct.ReplaceAllString(name, "")), "-")
}
