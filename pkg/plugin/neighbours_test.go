// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/exposure"
	"github.com/partage-dev/partage/pkg/neighbour"
)

func TestNeighbours(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		events := &fakeEvents{}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}}}
		node.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
		var mu sync.Mutex // what follows is the loop's as well
		var failure error
		var drivers []neighbour.Software
		var kinds []neighbour.Kind
		reads := 0
		l := &neighbourLoop{
			node: func(context.Context) (*corev1.Node, error) {
				mu.Lock()
				defer mu.Unlock()
				reads++
				return node, failure
			},
			otherDriver: func(context.Context) []neighbour.Software {
				mu.Lock()
				defer mu.Unlock()
				return drivers
			},
			events: events, interval: 30 * time.Second,
			observe: func(found []neighbour.Kind) {
				mu.Lock()
				defer mu.Unlock()
				kinds = found
			},
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			l.run(ctx, node)
		}()
		change := func(to func()) {
			mu.Lock()
			defer mu.Unlock()
			to()
		}
		wantReasons := func(want ...string) {
			t.Helper()
			var got []string
			for _, e := range events.list() {
				reason, _, _ := strings.Cut(e, ":")
				got = append(got, reason)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		}
		wantReads := func(least, most int) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if reads < least || reads > most {
				t.Errorf("the node was read %d times, want %d to %d", reads, least, most)
			}
		}
		pass(time.Minute)
		wantReasons("DevicePluginOnNode")
		wantReads(0, 0)

		change(func() { drivers = []neighbour.Software{{Kind: neighbour.DRADriver, Text: "it runs"}} })
		pass(time.Minute)
		wantReasons("DevicePluginOnNode", "OtherDRADriverOnNode")
		change(func() {
			if diff := cmp.Diff([]neighbour.Kind{neighbour.DevicePlugin, neighbour.DRADriver}, kinds); diff != "" {
				t.Errorf("kinds (-want +got):\n%s", diff)
			}
			drivers = nil
		})
		pass(time.Minute)
		wantReasons("DevicePluginOnNode", "OtherDRADriverOnNode", "NeighbourGone")

		// What is known of the node stays while it cannot be read.
		change(func() { failure = errors.New("away") })
		pass(15 * time.Minute)
		wantReasons("DevicePluginOnNode", "OtherDRADriverOnNode", "NeighbourGone")
		change(func() {
			failure = nil
			node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"nvidia.com/mig.config": "all-disabled"}}}
		})
		pass(15 * time.Minute)
		wantReasons("DevicePluginOnNode", "OtherDRADriverOnNode", "NeighbourGone", "NeighbourGone", "MIGManagerOnNode")
		// Events are kept for an hour.
		pass(time.Hour)
		wantReasons("DevicePluginOnNode", "OtherDRADriverOnNode", "NeighbourGone", "NeighbourGone", "MIGManagerOnNode", "MIGManagerOnNode")
		wantReads(8, 13)
		cancel()
		<-done
	})
}

// TestNodeUnread: an API server that has no time for the node is no error of the node, unless that
// lasts for several readings. It is told once.
func TestNodeUnread(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.build(t)
	unread := func(context.Context) (*corev1.Node, error) { return nil, context.DeadlineExceeded }
	noErrors := func(what string, look func(ctx context.Context)) {
		t.Helper()
		logger := ktesting.NewLogger(nopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		sink, buffered := logger.GetSink().(ktesting.Underlier)
		if !buffered {
			t.Fatal("the logger has no buffer")
		}
		for range 2 {
			look(klog.NewContext(t.Context(), logger))
		}
		log := sink.GetBuffer().Data()
		if len(log) != 1 || log[0].Type != ktesting.LogInfo {
			t.Errorf("%s: logged %v", what, log)
		}
	}
	neighbours := r.plugin.neighbours
	neighbours.node = unread
	noErrors("neighbours", func(ctx context.Context) {
		neighbours.readNode = time.Time{}
		neighbours.look(ctx, nil)
	})
	exposed := r.plugin.exposure
	exposed.node, exposed.check = unread, func([]string) (exposure.Finding, error) { return exposure.Finding{}, nil }
	noErrors("exposure", func(ctx context.Context) { exposed.look(ctx, nil) })
	if neighbours.unread.Patience < 2*nodeInterval {
		t.Errorf("after %s it is an error, and the node is read every %s", neighbours.unread.Patience, nodeInterval)
	}
}

// TestNeighbourRuns: the plugin itself finds NVIDIA's driver and the device plugin, and stays ready.
func TestNeighbourRuns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	listener, err := net.Listen("unix", filepath.Join(r.options.RegistrarDir, testDriver+"-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	r.api.SetAllocatable(testNode, "nvidia.com/gpu", 2)
	r.start(t)
	for _, want := range []string{"OtherDRADriverOnNode: NVIDIA's DRA driver runs on this node", "DevicePluginOnNode: A device plugin offers nvidia.com/gpu (2)"} {
		r.until(t, want, func(context.Context) error {
			if !slices.ContainsFunc(r.events.list(), func(e string) bool { return strings.HasPrefix(e, want) }) {
				return fmt.Errorf("events %q", r.events.list())
			}
			return nil
		})
	}
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
}
