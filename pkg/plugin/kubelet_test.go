// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/publish"
)

// nodeOf has a kubelet of a version.
func nodeOf(kubelet string) *corev1.Node {
	return &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: kubelet}}}
}

// TestKubelet: only a version that is known to be new enough counts.
func TestKubelet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		told, observed := &fakeEvents{}, "nothing"
		k := &kubelet{board: events.NewBoard(told), changed: loop.NewTrigger(), observe: func(knows *bool) {
			if observed = "unknown"; knows != nil {
				observed = fmt.Sprint(*knows)
			}
		}}
		if k.known() || k.knowsExtendedResources() {
			t.Error("something is known before the node was read")
		}
		for _, step := range []struct {
			node     *corev1.Node
			after    time.Duration
			knows    bool
			observed string
			changed  bool
			told     []string
		}{
			{node: nodeOf("v1.35.9"), observed: "false", changed: true, told: []string{reasonExtendedOff + ": The kubelet v1.35.9 would start"}},
			{node: nodeOf("v1.35.9"), after: nodeInterval, observed: "false"},
			{node: nodeOf("v1.36.0"), knows: true, observed: "true", changed: true, told: []string{reasonExtendedOn + ": The kubelet gives"}},
			{node: nodeOf("v1.36.0"), after: nodeInterval, knows: true, observed: "true"},
			{node: nodeOf(""), observed: "unknown", changed: true, told: []string{reasonExtendedOff + ": It is not known"}},
		} {
			time.Sleep(step.after)
			k.look(t.Context(), step.node)
			changed := false
			select {
			case <-k.changed:
				changed = true
			default:
			}
			if !k.known() || k.knowsExtendedResources() != step.knows || observed != step.observed || changed != step.changed {
				t.Errorf("%v: knows %t, observed %s, changed %t, want %+v", step.node, k.knowsExtendedResources(), observed, changed, step)
			}
			got := told.list()
			told.all = nil
			if len(got) != len(step.told) || len(got) > 0 && !strings.HasPrefix(got[0], step.told[0]) {
				t.Errorf("%v: told (-want +got):\n%s", step.node, cmp.Diff(step.told, got))
			}
		}
	})
}

// TestKubeletBecomesKnown between two polls: what was built before is not published, since it would take away for a moment what
// an earlier process has published.
func TestKubeletBecomesKnown(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.plugin.kubelet.looked = false
	s.discover()
	s.poll(0)
	s.plugin.kubelet.look(s.ctx, nodeOf("v1.37.1"))
	s.loop.handOn(s.ctx) // a condition has changed
	if s.handedOn() {
		t.Error("published what was built before the node was read")
	}
	select {
	case <-s.loop.surveyNow:
	default:
		t.Fatal("no poll is due")
	}
	s.poll(0)
	if !s.handedOn() {
		t.Fatal("nothing is published")
	}
	slices := publish.Resources(testDriver, testNode, s.published, publish.AllFeatures).Pools[testNode].Slices
	if !strings.Contains(fmt.Sprint(slices), device.ExtendedResources) {
		t.Error("what is published is not for extended resources")
	}
}

// TestKubeletIsUpgraded: what is published follows a kubelet that registers the plugin again, although its version shows a
// moment later.
func TestKubeletIsUpgraded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := &neighbourhood{node: nodeOf("v1.35.9"), events: &fakeEvents{}, observed: map[string]bool{}}
		l := n.loop()
		k := &kubelet{board: events.NewBoard(n.events), changed: loop.NewTrigger(), observe: func(*bool) {}}
		l.runtime, l.seen, l.restarted = nil, k.look, loop.NewTrigger()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			l.run(ctx, nil)
		}()
		l.registered()
		pass(time.Second)
		n.change(func() {
			if n.reads != 1 {
				t.Errorf("a plugin that starts reads the node %d times", n.reads)
			}
		})
		l.registered()
		pass(time.Second)
		n.change(func() { n.node = nodeOf("v1.36.1") })
		pass(2 * time.Minute)
		n.change(func() {
			if n.reads != 3 || !k.knowsExtendedResources() {
				t.Errorf("%d reads, knows %t", n.reads, k.knowsExtendedResources())
			}
			n.unread = errors.New("away")
		})
		pass(2 * nodeInterval)
		if !k.knowsExtendedResources() {
			t.Error("an API server that is away makes a kubelet forget what it knows")
		}
		cancel()
		<-done
	})
}

// TestOldKubelet: the plugin publishes for extended resources what the kubelet can hand out, and follows an upgrade.
func TestOldKubelet(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.api.SetKubelet(testNode, "v1.35.9")
	r.start(t)
	published := func(want bool) func(context.Context) error {
		return func(context.Context) error {
			n := 0
			for _, s := range r.api.Slices() {
				for _, d := range s.Spec.Devices {
					if _, has := d.Attributes[device.ExtendedResources]; has != want && *d.Attributes["type"].StringValue == string(device.Whole) {
						return fmt.Errorf("%s has the attribute: %t", d.Name, has)
					}
					n++
				}
			}
			if n == 0 {
				return errors.New("nothing is published")
			}
			return nil
		}
	}
	r.until(t, "slices without the attribute", published(false))
	r.api.SetKubelet(testNode, "v1.36.0")
	r.plugin.neighbours.registered()
	r.plugin.neighbours.registered()
	r.until(t, "slices with the attribute", published(true))
}

// TestUnreadNode: what an earlier process has published stays until it is known what the kubelet knows.
func TestUnreadNode(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.plugin.kubelet.looked = false
	s.discover()
	s.poll(time.Minute)
	if s.handedOn() {
		t.Error("published before the node was read")
	}
	s.plugin.kubelet.look(s.ctx, nodeOf("v1.36.0"))
	s.poll(time.Minute)
	if !s.handedOn() {
		t.Fatal("nothing is published")
	}
	if s.claims.inventory.AttributesOf(firstName)[device.ExtendedResources].BoolValue == nil {
		t.Error("published without the attribute")
	}
}
