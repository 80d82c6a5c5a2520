// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// TestOwnNode: what a change of the node means for slices, labels and conditions, and what is told of an annotation that names
// no GPU.
func TestOwnNode(t *testing.T) {
	t.Parallel()
	told := &fakeEvents{}
	registered, relabelled := 0, 0
	cordoned := loop.NewTrigger()
	n := newOwnNode(nil, testNode, events.NewBoard(told), func() { registered++ }, func() { relabelled++ }, cordoned)
	known := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: firstGPU}, {PCIAddress: secondGPU}}}
	object := func(uid types.UID, label, annotation string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			UID: uid, Labels: map[string]string{"pool": label}, Annotations: map[string]string{CordonAnnotation: annotation},
		}}
	}
	if all := n.conditions(t.Context(), known); len(all) > 0 {
		t.Errorf("before the node is known: %+v", all)
	}
	for _, step := range []struct {
		node                   *metav1.PartialObjectMetadata
		registered, relabelled int
		fired                  bool
		cordoned               []string
		told                   int
	}{
		{object("a", "x", ""), 0, 0, false, nil, 0},
		{object("a", "y", ""), 0, 1, false, nil, 0},
		{object("a", "y", secondGPU), 0, 1, true, []string{secondGPU}, 0},
		{object("a", "y", secondGPU), 0, 1, false, []string{secondGPU}, 0},
		{object("a", "y", "0000"+strings.ToUpper(firstGPU)+",\n"+secondGPU+"\n"), 0, 1, true, []string{firstGPU, secondGPU}, 0},
		{object("a", "y", "gpu-1,"+secondGPU), 0, 1, true, []string{secondGPU}, 1},
		{object("b", "y", ""), 1, 2, true, nil, 1},
	} {
		n.look(step.node)
		fired := len(cordoned) > 0
		if fired {
			<-cordoned
		}
		var got []string
		for _, c := range n.conditions(t.Context(), known) {
			if c.Reason != device.Cordoned {
				t.Errorf("%+v", c)
			}
			got = append(got, c.PCIAddress)
		}
		if registered != step.registered || relabelled != step.relabelled || fired != step.fired || !slices.Equal(got, step.cordoned) || len(told.list()) != step.told {
			t.Errorf("%+v: registered %d times, relabelled %d, fired %v, cordoned %v, told %q", step, registered, relabelled, fired, got, told.list())
		}
	}
	if told := told.list(); len(told) != 1 || !strings.Contains(told[0], `"gpu-1"`) {
		t.Errorf("told %q", told)
	}
}
