// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

// network is an API server with what may go wrong on the way to it, in fake time.
type network struct {
	*fakeapi.Server
	// fault returns what happens to a request instead, or nil.
	fault func(*http.Request) error
	// requests counts all of them, writes those that got through and change something.
	requests, writes atomic.Int64
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	return &network{Server: fakeapi.NewWithoutNetwork(t)}
}

func (n *network) RoundTrip(r *http.Request) (*http.Response, error) {
	n.requests.Add(1)
	if n.fault != nil {
		if err := n.fault(r); err != nil {
			return nil, err
		}
	}
	if r.Method != http.MethodGet {
		n.writes.Add(1)
	}
	return n.Transport().RoundTrip(r)
}

// hang lets a request hang until the client gives up.
func hang(r *http.Request) error {
	<-r.Context().Done()
	return r.Context().Err()
}

// events makes Events with clients like those of the plugin. ctx has their end.
func (n *network) events(ctx context.Context, t *testing.T) *Events {
	t.Helper()
	config := BackgroundConfig(&rest.Config{Host: "http://cluster", Transport: n, QPS: 50, Burst: 100})
	var clients [2]kubernetes.Interface
	for i := range clients {
		var err error
		if clients[i], err = kubernetes.NewForConfig(config); err != nil {
			t.Fatal(err)
		}
	}
	return NewEvents(ctx, clients[0], clients[1], testDriver, testNode)
}

// count returns how many events there are with a reason, and how often they were observed.
func (n *network) count(reason string) (events, times int) {
	for _, e := range n.Events() {
		if e.Reason == reason {
			events++
			times += int(e.Count)
		}
	}
	return events, times
}

// inBubble runs a test in fake time with a context that ends before the bubble does.
func inBubble(t *testing.T, test func(ctx context.Context, t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
		test(ctx, t)
		cancel()
		synctest.Wait()
	})
}

// after lets time pass.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

var (
	sick = device.Condition{PCIAddress: firstGPU, Reason: device.MPSUnhealthy, Message: "MPS on device gpu-0 is faulted"}
	gone = device.Condition{PCIAddress: secondGPU, Reason: device.Lost, Message: "it fell off the bus"}
)

// TestTenantsDoNotSilenceAlarms: users can make MPS fail as often as they like.
func TestTenantsDoNotSilenceAlarms(t *testing.T) {
	t.Parallel()
	for _, interval := range []time.Duration{0, time.Second} {
		t.Run(interval.String(), func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(ctx context.Context, t *testing.T) {
				const flaps = 1000
				n := newNetwork(t)
				user := setUsed(n.Server, "one", "p")
				r := conditionReporter{events: n.events(ctx, t), claims: &fakeClaims{live: []claim.LiveClaim{
					uses(user, "gpu-0", firstGPU, nil),
				}}}
				start := time.Now()
				for range flaps {
					r.report(ctx, device.Status{Conditions: []device.Condition{sick}})
					time.Sleep(interval)
					r.report(ctx, device.Status{})
					time.Sleep(interval)
				}
				r.report(ctx, device.Status{Conditions: []device.Condition{gone}})
				after(5 * time.Second)
				if events, times := n.count("GPULost"); events != 1 || times != 1 {
					t.Errorf("GPULost: %d events, %d times", events, times)
				}
				// Of the node, the claim and the pod, and two requests about its users.
				const series, lookUps = 3, 2
				budget := int64((2*series + 2*lookUps) * (seriesLimits.burst + 1 + int(time.Since(start)/seriesLimits.every)))
				if got := n.requests.Load(); got > budget {
					t.Errorf("%d requests for %d flaps, want at most %d", got, flaps, budget)
				}
				t.Logf("%d requests, %d of them writes, for %d flaps in %v", n.requests.Load(), n.writes.Load(), flaps, time.Since(start))
				// What was not written each time is counted.
				after(3 * seriesLimits.every)
				for _, reason := range []string{"MPSUnhealthy", "MPSRecovered"} {
					if events, times := n.count(reason); events != series || times != series*flaps {
						t.Errorf("%s: %d events, %d times", reason, events, times)
					}
				}
			})
		})
	}
}

// TestAlarmsOfGPUsAreIndependent: a GPU that is lost and comes back again and again does
// not silence the others.
func TestAlarmsOfGPUsAreIndependent(t *testing.T) {
	t.Parallel()
	inBubble(t, func(ctx context.Context, t *testing.T) {
		n := newNetwork(t)
		r := conditionReporter{events: n.events(ctx, t), claims: &fakeClaims{}}
		flapping := device.Condition{PCIAddress: firstGPU, Reason: device.Lost, Message: "it fell off the bus"}
		for i := range 1000 {
			flapping.Message = fmt.Sprintf("it fell off the bus, says call %s", strings.Repeat("a", i))
			r.report(ctx, device.Status{Conditions: []device.Condition{flapping}})
			r.report(ctx, device.Status{})
		}
		after(5 * time.Second)
		before, _ := n.count("GPULost")
		r.report(ctx, device.Status{Conditions: []device.Condition{gone}})
		after(5 * time.Second)
		if events, _ := n.count("GPULost"); events != before+1 || before > seriesLimits.burst {
			t.Errorf("%d events before, and %d with that of the second GPU", before, events)
		}
	})
}

// TestEventsDoNotWaitForTenants: what the API server does not take, or does not answer, of
// the events of tenants delays those of the node and those of other tenants by nothing, and
// by seconds at most.
func TestEventsDoNotWaitForTenants(t *testing.T) {
	t.Parallel()
	cases := 0
	for name, fault := range map[string]func(r *http.Request) error{
		"refused": func(*http.Request) error { return apierrors.NewInternalError(http.ErrHandlerTimeout) },
		"hangs":   hang,
	} {
		cases++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(ctx context.Context, t *testing.T) {
				n := newNetwork(t)
				n.fault = func(r *http.Request) error {
					if strings.Contains(r.URL.Path, "/namespaces/hostile/") {
						return fault(r)
					}
					return nil
				}
				events := n.events(ctx, t)
				for i := range 100 {
					ref := claim.Ref{Namespace: "hostile", Name: fmt.Sprintf("c%d", i), UID: "uid"}
					events.Warn(ctx, ref, "OrphanedClaimInUse", "it is kept")
					events.WarnUsers(ctx, ref, "MPSServerLost", "its server has ended")
				}
				after(time.Second)
				events.GPU(ctx, []string{firstGPU}, corev1.EventTypeWarning, "GPULost", "GPU "+firstGPU+": it fell off")
				events.Node(ctx, corev1.EventTypeWarning, "MPSUnhealthy", "GPU "+firstGPU+": MPS is faulted")
				after(time.Second)
				for _, reason := range []string{"GPULost", "MPSUnhealthy"} {
					if got, _ := n.count(reason); got != 1 {
						t.Errorf("%s: %d events after a second", reason, got)
					}
				}
				events.WarnUsers(ctx, setUsed(n.Server, "one", "p"), "PartitionGone", "its partition is gone")
				after(clusterTimeout)
				if got, _ := n.count("PartitionGone"); got != 2 {
					t.Errorf("%d of 2 events of another namespace after %v", got, clusterTimeout)
				}
			})
		})
	}
	if cases != 2 {
		t.Errorf("%d cases", cases)
	}
}

// TestOneEventThatFails does not delay others of its line, and is not tried without end.
func TestOneEventThatFails(t *testing.T) {
	t.Parallel()
	inBubble(t, func(ctx context.Context, t *testing.T) {
		n := newNetwork(t)
		var tries atomic.Int64
		n.fault = func(r *http.Request) error {
			body, err := r.GetBody()
			if err != nil {
				return err
			}
			if text, err := io.ReadAll(body); err != nil || strings.Contains(string(text), "c0.") {
				tries.Add(1)
				return apierrors.NewInternalError(http.ErrHandlerTimeout)
			}
			return nil
		}
		events := n.events(ctx, t)
		for i := range 8 {
			events.Warn(ctx, claim.Ref{Namespace: "team", Name: fmt.Sprintf("c%d", i), UID: "uid"}, "Damaged", "it cannot be read")
		}
		after(10 * time.Second)
		if got, _ := n.count("Damaged"); got != 7 {
			t.Errorf("%d of 7 events", got)
		}
		after(2 * time.Hour)
		was := tries.Load()
		if most := int64(eventTTL/lastRetry) + 10; was > most || was < 10 {
			t.Errorf("%d tries, want at most %d", was, most)
		}
		after(2 * time.Hour)
		if tries.Load() != was {
			t.Errorf("%d more tries", tries.Load()-was)
		}
		if l := events.users; len(l.lines) != 0 || l.waiting != 0 {
			t.Errorf("%d lines, %d reports are left", len(l.lines), l.waiting)
		}
	})
}

// TestEventsOutliveAnOutage: nothing is lost while the API server is away, an alarm is
// there soon after it is back, and nobody storms it.
func TestEventsOutliveAnOutage(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(r *http.Request) error{
		"unreachable": func(*http.Request) error { return http.ErrServerClosed },
		"hangs":       hang,
		"overloaded":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, func(ctx context.Context, t *testing.T) {
				const outage, claims = 5 * time.Minute, 20
				n := newNetwork(t)
				var away atomic.Bool
				away.Store(true)
				n.fault = func(r *http.Request) error {
					if fault == nil || !away.Load() {
						return nil
					}
					return fault(r)
				}
				if fault == nil {
					n.Refuse(func(*http.Request) *apierrors.StatusError {
						if !away.Load() {
							return nil
						}
						return apierrors.NewTooManyRequests("later", 0)
					})
				}
				events := n.events(ctx, t)
				for i := range claims {
					ref := setUsed(n.Server, fmt.Sprintf("c%d", i), fmt.Sprintf("p%d", i))
					events.WarnUsers(ctx, ref, "MPSServerLost", "its server has ended")
				}
				events.Node(ctx, corev1.EventTypeWarning, "MPSUnhealthy", "GPU "+firstGPU+": MPS is faulted")
				for range 10 {
					events.GPU(ctx, []string{firstGPU}, corev1.EventTypeWarning, "GPULost", "GPU "+firstGPU+": it fell off")
					after(outage / 10)
				}
				if got := len(n.Events()); got != 0 {
					t.Fatalf("%d events during the outage", got)
				}
				// At most a try in 30 s for each lane, and one for each new report.
				if got := n.requests.Load(); got > 3*40+claims {
					t.Errorf("%d requests during the outage", got)
				}
				t.Logf("%d requests during the outage", n.requests.Load())
				away.Store(false)
				after(lastRetry + lastRetry/5 + clusterTimeout)
				if got, times := n.count("GPULost"); got != 1 || times != 10 {
					t.Errorf("GPULost: %d events, %d times", got, times)
				}
				after(2 * time.Minute)
				if got, times := n.count("MPSServerLost"); got != 2*claims || times != 2*claims {
					t.Errorf("MPSServerLost: %d events, %d times", got, times)
				}
				if got, _ := n.count("MPSUnhealthy"); got != 1 {
					t.Errorf("MPSUnhealthy: %d events", got)
				}
			})
		})
	}
}

// TestEventsAreBounded: for a node, for a namespace and in memory, whatever is reported.
func TestEventsAreBounded(t *testing.T) {
	t.Parallel()
	inBubble(t, func(ctx context.Context, t *testing.T) {
		n := newNetwork(t)
		answers := make(chan struct{})
		n.fault = func(r *http.Request) error {
			if strings.Contains(r.URL.Path, "/namespaces/hostile/") {
				<-answers
			}
			return nil
		}
		events := n.events(ctx, t)
		start := time.Now()
		perNamespace := func(namespace string) (count int) {
			for _, e := range n.Events() {
				if e.Namespace == namespace {
					count += int(e.Count)
				}
			}
			return count
		}
		for i := range maxWaiting + 600 {
			events.Warn(ctx, claim.Ref{Namespace: "hostile", Name: fmt.Sprintf("c%d", i), UID: "uid"}, "Damaged", "it cannot be read")
			events.Node(ctx, corev1.EventTypeWarning, "Odd", fmt.Sprintf("message %d", i))
			if i == 0 {
				// The first one is being written, so that nobody takes another of those that wait.
				synctest.Wait()
			}
		}
		events.users.mu.Lock()
		waiting := events.users.waiting
		events.users.mu.Unlock()
		if waiting != maxWaiting {
			t.Errorf("%d reports wait", waiting)
		}
		close(answers)
		// Those that wait are not those of others.
		events.Warn(ctx, claim.Ref{Namespace: "team", Name: "one", UID: "uid"}, "Damaged", "it cannot be read")
		after(5 * time.Second)
		if got := perNamespace("team"); got != 1 {
			t.Errorf("%d events of another namespace after 5 s", got)
		}
		after(30 * time.Minute)
		for namespace, most := range map[string]int{
			"hostile": userLimits.line.burst + int(time.Since(start)/userLimits.line.every) + 1,
			"default": seriesLimits.burst + int(time.Since(start)/seriesLimits.every) + 1,
		} {
			if got := perNamespace(namespace); got > most || got < most-2 {
				t.Errorf("%s: %d events, want %d", namespace, got, most)
			}
		}
	})
}

// TestLinesEnd: namespaces come and go, and a node may run for years.
func TestLinesEnd(t *testing.T) {
	t.Parallel()
	inBubble(t, func(ctx context.Context, t *testing.T) {
		n := newNetwork(t)
		events := n.events(ctx, t)
		const namespaces = 50
		for i := range namespaces {
			events.Warn(ctx, claim.Ref{Namespace: fmt.Sprintf("run-%d", i), Name: "one", UID: "uid"}, "Damaged", "it cannot be read")
		}
		after(time.Minute)
		if got := len(n.Events()); got != namespaces {
			t.Errorf("%d events", got)
		}
		after(3 * eventTTL)
		events.users.mu.Lock()
		defer events.users.mu.Unlock()
		if got := len(events.users.lines); got != 0 {
			t.Errorf("%d lines are left", got)
		}
	})
}
