// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
)

// bubble is a plugin without sockets and without an API server, whose loops can
// therefore run in a bubble of synctest.
type bubble struct {
	*Plugin

	claims   *fakeClaims
	hardware *fakeHardware
	// published counts how often something was given to the publisher.
	published int
	logs      ktesting.Buffer
	ctx       context.Context //nolint:containedctx // of a test, with its logger
}

func newBubble(t *testing.T) *bubble {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://not-used", QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	b := &bubble{claims: &fakeClaims{}, hardware: &fakeHardware{node: testNodeWith(firstGPU)}}
	b.Plugin, err = New(Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: client, Claims: b.claims, Hardware: b.hardware,
		DataDir: "not-used", RegistrarDir: "not-used", Policy: &fakePolicy{current: withoutShares()},
		PollInterval: 10 * time.Second, ReconcileInterval: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.gpus.publisher, b.gpus.desired.stored = b, b
	logger := ktesting.NewLogger(nopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	b.logs, b.ctx = sink.GetBuffer(), klog.NewContext(t.Context(), logger)
	return b
}

func (b *bubble) SetInventory(*device.Inventory) { b.published++ }

func (b *bubble) Stored(context.Context) ([]resourceapi.ResourceSlice, error) { return nil, nil }

// run runs the loops until end is called.
func (b *bubble) run() (end func()) {
	ctx, cancel := context.WithCancel(b.ctx)
	go b.gpus.run(ctx)
	go b.runReconciler(ctx)
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
		b.claims.onSurvey = func() { <-surveyed }
		prepared := false
		b.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error {
			prepared = true
			return nil
		}
		answered := make(chan error, 1)
		go func() {
			results, err := b.service.PrepareResourceClaims(b.ctx, []*resourceapi.ResourceClaim{{}})
			answered <- errors.Join(err, results[""].Err)
		}()
		defer b.run()()
		synctest.Wait()
		if prepared {
			t.Error("a claim is prepared before the survey")
		}
		close(surveyed)
		if err := <-answered; err != nil || !prepared {
			t.Errorf("prepared is %v, error %v", prepared, err)
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

// TestReconcilePanics: a defect in cleaning up is a failed round, and the next one
// comes at its time.
func TestReconcilePanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		rounds := 0
		b.claims.onReconcile = func() {
			if rounds++; rounds <= 2 {
				panic("a defect")
			}
		}
		defer b.run()()
		synctest.Wait()
		if rounds != 1 || b.panicked("fakeClaims") != 1 {
			t.Errorf("%d rounds at the start, log:\n%s", rounds, b.logs)
		}
		for want := 2; want <= 4; want++ {
			pass(b.options.ReconcileInterval)
			if rounds != want {
				t.Errorf("%d rounds, want %d", rounds, want)
			}
		}
		for _, line := range []string{"Not everything is cleaned up", "Everything is cleaned up"} {
			if strings.Count(b.logs.String(), line) != 1 {
				t.Errorf("%q is not logged once:\n%s", line, b.logs)
			}
		}
	})
}

// TestSurveyPanics: a defect in surveying leaves the conditions as they were, and
// the next poll comes at its time.
func TestSurveyPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		broken := false
		b.claims.onSurvey = func() {
			if broken {
				panic("a defect")
			}
		}
		occupied := device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied, Message: "another partition"}}}
		b.claims.setStatus(occupied)
		defer b.run()()
		synctest.Wait()
		reasons := func() int { return len(b.gpus.state.status().Conditions) }
		if reasons() != 1 || b.published != 1 {
			t.Fatalf("%d conditions, published %d times, want 1 and 1", reasons(), b.published)
		}
		poll := func() { pass(b.options.PollInterval) }
		broken = true
		poll()
		poll()
		if reasons() != 1 || b.published != 1 || b.panicked("fakeClaims") != 1 {
			t.Errorf("%d conditions, published %d times, want 1 and 1; log:\n%s", reasons(), b.published, b.logs)
		}
		broken = false
		b.claims.setStatus(device.Status{})
		poll()
		if reasons() != 0 || b.published != 2 {
			t.Errorf("%d conditions, published %d times, want 0 and 2", reasons(), b.published)
		}
	})
}

// TestFirstSurveyPanics: what is published before the first survey would say that
// all is well.
func TestFirstSurveyPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		broken := true
		b.claims.onSurvey = func() {
			if broken {
				panic("a defect")
			}
		}
		defer b.run()()
		synctest.Wait()
		if reason := b.readiness.notReady(); b.published != 0 || !strings.Contains(reason, "a defect") {
			t.Errorf("published %d times, not ready because of %q", b.published, reason)
		}
		results, err := b.service.PrepareResourceClaims(b.ctx, []*resourceapi.ResourceClaim{{}})
		if err := errors.Join(err, results[""].Err); err != nil {
			t.Errorf("a claim is not let through: %v", err)
		}
		broken = false
		pass(b.options.PollInterval)
		if b.published != 1 {
			t.Errorf("published %d times, want 1", b.published)
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
		if b.published != 1 {
			t.Errorf("published %d times, want 1", b.published)
		}
	})
}
