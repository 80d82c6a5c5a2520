// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
)

// neighbourhood is a node whose software a test replaces.
type neighbourhood struct {
	mu     sync.Mutex
	node   *corev1.Node
	driver bool
	access unclaimed.Access
	// unknown is why the container runtime cannot be looked at.
	unknown  error
	handlers []string
	events   *fakeEvents
	observed map[string]bool
}

func (n *neighbourhood) change(to func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	to()
}

func (n *neighbourhood) finder() *softwareFinder {
	return &softwareFinder{
		node: func() *corev1.Node {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.node
		},
		otherDriver: func(context.Context) unclaimed.Finding {
			n.mu.Lock()
			defer n.mu.Unlock()
			return unclaimed.Finding{Kind: unclaimed.DRADriver, There: n.driver, Text: "it runs"}
		},
		runtime: func(handlers []string) (unclaimed.Access, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.handlers = handlers
			return n.access, n.unknown
		},
		observe: func(kind string, there *bool) {
			n.change(func() {
				if delete(n.observed, kind); there != nil {
					n.observed[kind] = *there
				}
			})
		},
	}
}

// told are the reasons of the events since the last call.
func (n *neighbourhood) told() []string {
	n.events.mu.Lock()
	defer n.events.mu.Unlock()
	var reasons []string
	for _, e := range n.events.all {
		reason, _, _ := strings.Cut(e, ":")
		reasons = append(reasons, reason)
	}
	n.events.all = nil
	return reasons
}

func (n *neighbourhood) want(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, n.told()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// nodeWith has handlers of its container runtime.
func nodeWith(handlers ...string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}}}
	for _, name := range handlers {
		node.Status.RuntimeHandlers = append(node.Status.RuntimeHandlers, corev1.NodeRuntimeHandler{Name: name})
	}
	return node
}

// TestNeighbours: what appears and what goes is an event. What cannot be looked at stays as it was.
func TestNeighbours(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		first := nodeWith("", "first")
		first.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}
		open := unclaimed.Access{Runtime: "/bin/x", Through: "/bin/x", Config: "/etc/x", Accepts: true}
		n := &neighbourhood{access: open, events: &fakeEvents{}, observed: map[string]bool{}}
		monitor, notifier := newNeighbourMonitor(withoutForeign, n.finder().find, 30*time.Second, loop.NewTrigger()), events.NewNotifier(n.events.Tell)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			monitor.run(ctx)
		}()
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-monitor.changed:
					w := want(&observedState{neighbours: *monitor.latest.Load()})
					notifier.Set(ctx, "node", w.events, w.over)
				}
			}
		}()
		pass(time.Minute)
		n.want(t)
		n.change(func() {
			if n.handlers != nil || len(n.observed) != 1 {
				t.Errorf("before the node was read: handlers %v, observed %v", n.handlers, n.observed)
			}
			n.node = first
		})
		pass(time.Minute)
		n.want(t, "GPUsWithoutClaims", "DevicePluginOnNode")
		n.change(func() {
			if !slices.Equal(n.handlers, []string{"first"}) {
				t.Errorf("handlers %v", n.handlers)
			}
			n.driver = true
		})
		pass(time.Minute)
		n.want(t, "OtherDRADriverOnNode")
		n.change(func() {
			want := map[string]bool{"device-plugin": true, "dra-driver": true, "mig-manager": false, "container-runtime": true}
			if !maps.Equal(n.observed, want) {
				t.Errorf("observed %v, want %v", n.observed, want)
			}
			n.driver = false
		})
		pass(time.Minute)
		n.want(t, "NeighbourGone")

		n.change(func() { n.unknown, n.access = errors.New("no process"), unclaimed.Access{} })
		pass(10 * time.Minute)
		n.want(t)
		n.change(func() {
			if known, found := n.observed["container-runtime"]; found {
				t.Errorf("what could not be found out is observed as %v", known)
			}
			n.unknown = nil
			n.node = nodeWith("later")
			n.node.Labels["nvidia.com/mig.config"] = "all-disabled"
		})
		pass(time.Minute)
		n.want(t, "GPUsOnlyWithClaims", "NeighbourGone", "MIGManagerOnNode")
		n.change(func() {
			if !slices.Equal(n.handlers, []string{"later"}) {
				t.Errorf("handlers %v", n.handlers)
			}
			n.access = open
		})
		pass(time.Minute)
		n.want(t, "GPUsWithoutClaims")
		cancel()
		<-done
	})
}

// TestNeighbourRuns: the plugin itself finds NVIDIA's driver, the device plugin and NVIDIA's container runtime, and stays ready.
func TestNeighbourRuns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	listener, err := net.Listen("unix", filepath.Join(r.options.RegistrarDir, testDriver+"-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	r.api.AddNode(testNode, "own")
	r.api.SetAllocatable(testNode, "nvidia.com/gpu", 2)
	r.options.Runtime = func(handlers []string) (unclaimed.Access, error) {
		return unclaimed.Access{Runtime: "runc", Handlers: append(handlers, "nvidia"), Config: "/etc/x", Accepts: true}, nil
	}
	r.start(t)
	for _, want := range []string{
		"OtherDRADriverOnNode: NVIDIA's DRA driver runs on this node", "DevicePluginOnNode: A device plugin offers nvidia.com/gpu (2)",
		"GPUsWithoutClaims: Pods can have all GPUs of this node without a claim: a RuntimeClass with handler own or nvidia",
	} {
		r.until(t, want, func(context.Context) error {
			if !slices.ContainsFunc(r.events.list(), func(e string) bool { return strings.HasPrefix(e, want) }) {
				return fmt.Errorf("events %q", r.events.list())
			}
			return nil
		})
	}
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
}
