// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// TestOwnNode: what a change of the node means for others and for conditions, and what is told of an annotation that names
// no GPU.
func TestOwnNode(t *testing.T) {
	t.Parallel()
	told := &fakeEvents{}
	var seen *metav1.PartialObjectMetadata
	cordoned := loop.NewTrigger()
	n := newOwnNode(nil, testNode, events.NewBoard(told), func(node *metav1.PartialObjectMetadata) { seen = node }, cordoned)
	known := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: firstGPU}, {PCIAddress: secondGPU}}}
	object := func(uid types.UID, label, annotation string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			UID: uid, Labels: map[string]string{"pool": label}, Annotations: map[string]string{CordonAnnotation: annotation},
		}}
	}
	if all := n.conditions(t.Context(), known, true); len(all) > 0 {
		t.Errorf("before the node is known: %+v", all)
	}
	for _, step := range []struct {
		node     *metav1.PartialObjectMetadata
		fired    bool
		cordoned []string
		told     int
	}{
		{object("a", "x", ""), false, nil, 0},
		{object("a", "y", ""), false, nil, 0},
		{object("a", "y", secondGPU), true, []string{secondGPU}, 0},
		{object("a", "y", secondGPU), false, []string{secondGPU}, 0},
		{object("a", "y", "0000"+strings.ToUpper(firstGPU)+",\n"+secondGPU+"\n"), true, []string{firstGPU, secondGPU}, 0},
		{object("a", "y", "gpu-1,"+secondGPU), true, []string{secondGPU}, 1},
		{object("b", "y", ""), true, nil, 1},
	} {
		n.watch.Changed(step.node, false)
		fired := len(cordoned) > 0
		if fired {
			<-cordoned
		}
		var got []string
		for _, c := range n.conditions(t.Context(), known, true) {
			if c.Reason != device.Cordoned {
				t.Errorf("%+v", c)
			}
			got = append(got, c.PCIAddress)
		}
		if seen != step.node || fired != step.fired || !slices.Equal(got, step.cordoned) || len(told.list()) != step.told {
			t.Errorf("%+v: seen %+v, fired %v, cordoned %v, told %q", step, seen, fired, got, told.list())
		}
	}
	for what, change := range map[string]func(){
		"deleted": func() { n.watch.Changed(object("b", "y", ""), true) },
		"absent":  func() { n.watch.Listed(nil, time.Now()) },
	} {
		n.watch.Listed([]metav1.PartialObjectMetadata{*object("b", "y", "")}, time.Now())
		if change(); seen.UID != "" {
			t.Errorf("%s: seen %+v", what, seen)
		}
	}
	if told := told.list(); len(told) != 1 || !strings.Contains(told[0], `"gpu-1"`) {
		t.Errorf("told %q", told)
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
	told := &fakeEvents{}
	n := newOwnNode(nil, testNode, events.NewBoard(told), func(*metav1.PartialObjectMetadata) {}, loop.NewTrigger())
	n.look(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: "a", Annotations: map[string]string{CordonAnnotation: secondGPU}}})
	recalled := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: firstGPU}}}
	for _, discovered := range []bool{false, true} {
		n.conditions(t.Context(), recalled, discovered)
		if got := len(told.list()) > 0; got != discovered {
			t.Errorf("discovered %t: told %q", discovered, told.list())
		}
	}
}
