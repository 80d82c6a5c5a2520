// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish"
)

// bubble is a plugin without sockets and without an API server, whose loops can
// therefore run in a bubble of synctest.
type bubble struct {
	*Plugin

	claims   *fakeClaims
	hardware *fakeHardware
	mu       sync.Mutex
	// inventories are those that the publisher was given.
	inventories []*device.Inventory
	logs        ktesting.Buffer
	ctx         context.Context //nolint:containedctx // of a test, with its logger
}

func newBubble(t *testing.T) *bubble {
	t.Helper()
	config := &rest.Config{Host: "http://not-used", QPS: -1}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	b := &bubble{claims: &fakeClaims{}, hardware: &fakeHardware{node: testNodeWith(firstGPU)}}
	b.Plugin = New(Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: client, MetadataClient: metadataClient, Claims: b.claims, Hardware: b.hardware,
		DataDir: "not-used", CDIDir: "/cdi", RegistrarDir: "not-used", BootID: "boot-1", Policy: &fakePolicy{current: withoutShares()},
		PollInterval: 10 * time.Second, Events: (&fakeEvents{}).Tell, Metrics: metrics.New(metrics.Options{}), Runtime: withoutRuntime, ForeignClaims: withoutForeign,
	})
	b.gpus.publish, b.gpus.desired.stored = b.publish, b
	b.node.now.Store(nodeOf("v1.35.9")) // Run reads the node
	logger := ktesting.NewLogger(nopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	b.logs, b.ctx = sink.GetBuffer(), klog.NewContext(t.Context(), logger)
	return b
}

func (b *bubble) publish(w *wanted) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.certain {
		b.inventories = append(b.inventories, w.inventory)
	}
}

// published counts how often something was published.
func (b *bubble) published() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.inventories)
}

// taints counts those that were published last.
func (b *bubble) taints() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	found := 0
	for _, slice := range publish.Resources(testDriver, testNode, b.inventories[len(b.inventories)-1], publish.AllFeatures).Pools[testNode].Slices {
		for _, d := range slice.Devices {
			if !isObserver(d) {
				found += len(d.Taints)
			}
		}
	}
	return found
}

func (b *bubble) Stored(context.Context) ([]resourceapi.ResourceSlice, error) { return nil, nil }

// run runs the loops until end is called.
func (b *bubble) run() (end func()) {
	ctx, cancel := context.WithCancel(b.ctx)
	go b.service.neighbours.run(ctx)
	go b.gpus.run(ctx)
	return func() {
		cancel()
		synctest.Wait()
	}
}

// pass lets time of the bubble pass, and all loops do what is due.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestSurveyComesBeforeClaims: claims that have partitions of others must find
// them right after the start.
func TestSurveyComesBeforeClaims(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		surveyed := make(chan struct{})
		b.claims.onReconcile = func() { <-surveyed }
		var prepared atomic.Bool
		b.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error {
			prepared.Store(true)
			return nil
		}
		answered := make(chan error, 1)
		go func() {
			results, err := b.service.PrepareResourceClaims(b.ctx, []*resourceapi.ResourceClaim{{}})
			answered <- errors.Join(err, results[""].Err)
		}()
		defer b.run()()
		synctest.Wait()
		if prepared.Load() {
			t.Error("a claim is prepared before the survey")
		}
		close(surveyed)
		if err := <-answered; err != nil || !prepared.Load() {
			t.Errorf("prepared is %v, error %v", prepared.Load(), err)
		}
	})
}

// panicked counts the panics that were logged with their stack.
func (b *bubble) panicked(where string) int {
	found := 0
	for _, entry := range b.logs.Data() {
		if strings.Contains(entry.Message, "panic") && entry.Err != nil && strings.Contains(entry.Err.Error(), "a defect") {
			for _, value := range entry.ParameterKVList {
				if stack, ok := value.(string); ok && strings.Contains(stack, where) {
					found++
				}
			}
		}
	}
	return found
}

// TestReconcilePanics: a defect in cleaning up, or surveying, leaves the conditions as they were, and the next poll comes at its
// time.
func TestReconcilePanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		var broken atomic.Bool
		b.claims.onReconcile = func() {
			if broken.Load() {
				panic("a defect")
			}
		}
		occupied := device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied, Message: "another partition"}}}
		b.claims.setStatus(occupied)
		defer b.run()()
		synctest.Wait()
		if b.taints() != 4 || b.published() != 1 {
			t.Fatalf("%d taints, published %d times, want 4 and 1", b.taints(), b.published())
		}
		poll := func() {
			before := b.claims.rounds()
			pass(b.options.PollInterval)
			if rounds := b.claims.rounds() - before; !broken.Load() && rounds != 1 {
				t.Errorf("%d rounds", rounds)
			}
		}
		broken.Store(true)
		poll()
		poll()
		if b.taints() != 4 || b.panicked("fakeClaims") != 1 {
			t.Errorf("%d taints, want 4; log:\n%s", b.taints(), b.logs)
		}
		broken.Store(false)
		b.claims.setStatus(device.Status{})
		poll()
		if b.taints() != 0 {
			t.Errorf("%d taints, want 0", b.taints())
		}
		for _, line := range []string{"The GPUs could not be surveyed", "The GPUs can be surveyed again"} {
			if strings.Count(b.logs.String(), line) != 1 {
				t.Errorf("%q is not logged once:\n%s", line, b.logs)
			}
		}
	})
}

// TestFirstSurveyPanics: what is published before the first survey would say that
// all is well.
func TestFirstSurveyPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		var broken atomic.Bool
		broken.Store(true)
		b.claims.onReconcile = func() {
			if broken.Load() {
				panic("a defect")
			}
		}
		defer b.run()()
		synctest.Wait()
		if reason := b.readiness.notReady(); b.published() != 0 || !strings.Contains(reason, "a defect") {
			t.Errorf("published %d times, not ready because of %q", b.published(), reason)
		}
		results, err := b.service.PrepareResourceClaims(b.ctx, []*resourceapi.ResourceClaim{{}})
		if err := errors.Join(err, results[""].Err); err != nil {
			t.Errorf("a claim is not let through: %v", err)
		}
		broken.Store(false)
		pass(b.options.PollInterval)
		if b.published() != 1 {
			t.Errorf("published %d times, want 1", b.published())
		}
	})
}

// TestDiscoveryPanics: it is a discovery that failed.
func TestDiscoveryPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		b.hardware.setOnDiscover(func(context.Context) error { panic("a defect") })
		defer b.run()()
		synctest.Wait()
		if reason := b.readiness.notReady(); !strings.Contains(reason, "a defect") || b.panicked("fakeHardware") != 1 {
			t.Errorf("not ready because of %q", reason)
		}
		b.hardware.setOnDiscover(nil)
		pass(2 * b.options.PollInterval)
		if b.published() == 0 {
			t.Error("nothing is published after the defect is gone")
		}
	})
}

// TestUsersAwaitSurvey: neither the status of claims nor the kubelet gets anything about devices before enough of the GPUs were observed.
func TestUsersAwaitSurvey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		client := fake.NewClientset()
		b.status = claimstatus.New(claimstatus.Options{DriverName: testDriver, Client: client, Newest: b.publisher.Newest})
		ctx, cancel := context.WithCancel(b.ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.status.Run(ctx)
		}()
		b.claims.setLive(uses(claim.Ref{Namespace: "ml", Name: "one", UID: "uid-1"}, firstName, firstGPU, nil))
		l := b.gpus
		l.publish, l.gpus.node, l.survey.at = b.Plugin.publish, testNodeWith(firstGPU), time.Now()
		l.inventory = inventoryOf(t, l.gpus.node)
		for _, l.survey.enough = range []bool{false, true} {
			l.propagate(ctx)
			synctest.Wait()
			kubelet, status := !l.states.surveyedAt.IsZero(), len(client.Actions()) > 0
			if kubelet != l.survey.enough || status != l.survey.enough {
				t.Errorf("enough %t: the kubelet is told: %t, the status is written: %t", l.survey.enough, kubelet, status)
			}
		}
		cancel()
		<-ended
	})
}
