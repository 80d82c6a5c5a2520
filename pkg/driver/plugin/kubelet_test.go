// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish"
)

// nodeOf has a kubelet of a version.
func nodeOf(kubelet string) *corev1.Node {
	return &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: kubelet}}}
}

// TestKubelet: only a version that is known to be new enough counts. What is told of it is told once.
func TestKubelet(t *testing.T) {
	t.Parallel()
	r, told := newRig(t), &fakeEvents{}
	r.build(t)
	n, notifier := r.plugin.node, events.NewNotifier(told.Tell)
	for _, step := range []struct {
		node    *corev1.Node
		knows   bool
		changed bool
		told    []string
	}{
		{},
		{node: nodeOf("v1.35.9"), changed: true, told: []string{reasonExtendedOff + ": The kubelet v1.35.9 would start"}},
		{node: nodeOf("v1.35.9")},
		{node: nodeOf("v1.36.0"), knows: true, changed: true, told: []string{reasonExtendedOn + ": The kubelet gives"}},
		{node: nodeOf("v1.36.0"), knows: true},
		{node: nodeOf(""), changed: true, told: []string{reasonExtendedOff + ": It is not known"}},
	} {
		if step.node != nil {
			n.update(step.node)
		}
		changed := false
		select {
		case <-n.changed:
			changed = true
		default:
		}
		w := want(&observedState{node: n.now.Load()})
		notifier.Set(t.Context(), "node", w.events, w.over)
		if knows, _ := extendedResources(n.now.Load()); knows != step.knows || changed != step.changed {
			t.Errorf("%v: knows %t, changed %t, want %+v", step.node, knows, changed, step)
		}
		got := told.list()
		told.all = nil
		if len(got) != len(step.told) || len(got) > 0 && !strings.HasPrefix(got[0], step.told[0]) {
			t.Errorf("%v: told (-want +got):\n%s", step.node, cmp.Diff(step.told, got))
		}
	}
}

// TestKubeletBecomesKnown between two polls: what was built before is not published, since it would take away for a moment what
// an earlier process has published.
func TestKubeletBecomesKnown(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.plugin.node.now.Store(nil)
	s.discover()
	s.poll(0)
	s.plugin.node.update(nodeOf("v1.37.1"))
	s.loop.propagate(s.ctx) // a condition has changed
	if s.handedOn() {
		t.Error("published what was built before the node was read")
	}
	select {
	case <-s.loop.pollNow:
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
	r.until(t, "slices with the attribute", published(true))
}

// TestUnreadNode: what an earlier process has published stays until it is known what the kubelet knows.
func TestUnreadNode(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.plugin.node.now.Store(nil)
	s.discover()
	s.poll(time.Minute)
	if s.handedOn() {
		t.Error("published before the node was read")
	}
	s.plugin.node.update(nodeOf("v1.36.0"))
	s.poll(time.Minute)
	if !s.handedOn() {
		t.Fatal("nothing is published")
	}
	if s.claims.inventory.AttributesOf(firstName)[device.ExtendedResources].BoolValue == nil {
		t.Error("published without the attribute")
	}
}

// TestExtendedResourcesMetric: it follows the kubelet, whatever is known of GPUs, and is absent while its version is not known.
func TestExtendedResourcesMetric(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.build(t)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer r.options.Metrics.Serve(t.Context(), listener)()
	for _, step := range []struct {
		node *corev1.Node
		want string
	}{
		{nil, ""}, {nodeOf("v1.35.9"), "0"}, {nodeOf("v1.36.0"), "1"}, {nodeOf(""), ""},
	} {
		if step.node != nil {
			r.plugin.node.update(step.node)
		}
		r.plugin.gpus.propagate(t.Context())
		answer, err := http.Get("http://" + listener.Addr().String() + metrics.Path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(answer.Body)
		if err = errors.Join(err, answer.Body.Close()); err != nil {
			t.Fatal(err)
		}
		_, value, _ := strings.Cut(string(body), "\npartage_extended_resources ")
		if value, _, _ = strings.Cut(value, "\n"); value != step.want {
			t.Errorf("%v: got %q, want %q", step.node, value, step.want)
		}
	}
}
