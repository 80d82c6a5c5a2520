// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestOwnNode: what a change of the node means for others and for conditions, and what is told of an annotation that names
// no GPU.
func TestOwnNode(t *testing.T) {
	t.Parallel()
	var stopped error
	changed := loop.NewTrigger()
	n := newOwnNode(fake.NewClientset(), testNode, changed, func(err error) { stopped = err })
	gpus := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: firstGPU}, {PCIAddress: secondGPU}}}
	object := func(uid types.UID, label, annotation string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			UID: uid, Labels: map[string]string{"pool": label}, Annotations: map[string]string{api.CordonAnnotation: annotation},
		}}
	}
	upgraded := object("c", "y", "")
	upgraded.Status.NodeInfo.KubeletVersion = "v1.36.0"
	only := func(node *corev1.Node) map[types.UID]metav1.Object {
		return map[types.UID]metav1.Object{node.UID: node}
	}
	if all, unknown := cordon(nil, gpus); len(all)+len(unknown) > 0 {
		t.Errorf("before the node is known: %+v, %+v", all, unknown)
	}
	for _, step := range []struct {
		node     *corev1.Node
		fired    bool
		cordoned []string
		unknown  int
	}{
		{object("a", "x", ""), true, nil, 0},
		{object("a", "y", ""), true, nil, 0},
		{object("a", "y", ""), false, nil, 0},
		{object("a", "y", secondGPU), true, []string{secondGPU}, 0},
		{object("a", "y", secondGPU), false, []string{secondGPU}, 0},
		{object("a", "y", "0000"+strings.ToUpper(firstGPU)+",\n"+secondGPU+"\n"), true, []string{firstGPU, secondGPU}, 0},
		{object("a", "y", "gpu-1,"+secondGPU), true, []string{secondGPU}, 1},
		{object("b", "y", ""), true, nil, 0},
		{object("c", "y", ""), true, nil, 0},
		{upgraded, true, nil, 0},
	} {
		n.watch.Changed(only(step.node))
		fired := len(changed) > 0
		if fired {
			<-changed
		}
		all, unknown := cordon(n.now.Load(), gpus)
		var got []string
		for _, c := range all {
			if c.Reason != device.Cordoned {
				t.Errorf("%+v", c)
			}
			got = append(got, c.PCIAddress)
		}
		if n.now.Load() != step.node || fired != step.fired || !slices.Equal(got, step.cordoned) || len(unknown) != step.unknown {
			t.Errorf("%+v: seen %+v, fired %v, cordoned %v, unknown %+v", step, n.now.Load(), fired, got, unknown)
		}
		if len(unknown) > 0 && !strings.Contains(unknown[0].Text, `"gpu-1"`) {
			t.Errorf("told %+v", unknown)
		}
	}
	n.watch.Changed(nil)
	if seen := n.now.Load(); seen.UID != "" || len(seen.Labels)+len(seen.Annotations) > 0 || stopped != nil {
		t.Errorf("deleted: seen %+v, stopped %v", seen, stopped)
	}
	n.now.Store(nil)
	if n.watch.Changed(nil); stopped == nil || !strings.Contains(stopped.Error(), testNode) {
		t.Errorf("there never was such a node: stopped %v", stopped)
	}
}

// TestNodeMadeAgain: slices are the new node's, after the garbage collector has deleted those of the old one.
func TestNodeMadeAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.api.DeleteNode(testNode)
	r.api.DeleteSlices()
	r.api.AddNode(testNode)
	r.untilPublished(t, 4, 1)
	r.until(t, "slices of the new node", func(context.Context) error {
		want := r.api.Node(testNode).UID
		for _, slice := range r.api.Slices() {
			if slice.OwnerReferences[0].UID != want {
				return fmt.Errorf("slice %s belongs to %s, want %s", slice.Name, slice.OwnerReferences[0].UID, want)
			}
		}
		return nil
	})
}

// TestCordonBeforeDiscovery: which GPUs the node has is not known yet, so that no name is called wrong.
func TestCordonBeforeDiscovery(t *testing.T) {
	t.Parallel()
	o := surveyed(device.Status{}, nil)
	o.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{api.CordonAnnotation: "0000:ff:00.0"}}}
	for _, o.gpus.discovered = range []bool{false, true} {
		told := slices.ContainsFunc(want(o).events, func(s events.Statement) bool { return s.Reason == reasonCordonUnknown })
		if told != o.gpus.discovered {
			t.Errorf("discovered %t: told %t", o.gpus.discovered, told)
		}
	}
}
