// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// hostile makes claims of a tenant, each with a pod.
func (n *network) hostile(claims int) (refs []claim.Ref) {
	for i := range claims {
		ref := claim.Ref{Namespace: "hostile", Name: fmt.Sprintf("c%d", i), UID: "uid"}
		n.SetClaim(&resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID},
			Status: resourceapi.ResourceClaimStatus{
				Allocation: &resourceapi.AllocationResult{}, ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "p" + ref.Name, UID: "u"}},
			},
		})
		refs = append(refs, ref)
	}
	return refs
}

// wantWithin waits for an event and the one of a pod.
func (n *network) wantWithin(t *testing.T, most time.Duration, reason string) {
	t.Helper()
	told := time.Now()
	for got := 0; got < 2; got, _ = n.count(reason) {
		if time.Since(told) > most {
			t.Errorf("of another namespace: %d of 2 events after %s", got, most)
			return
		}
		after(10 * time.Second)
	}
}

// TestFlood: a tenant with many claims lets MPS fail again and again, which delays others by a moment.
func TestFlood(t *testing.T) {
	t.Parallel()
	for _, claims := range []int{48, 300} {
		t.Run(fmt.Sprint(claims), func(t *testing.T) {
			t.Parallel()
			inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
				refs, victim := n.hostile(claims), n.setUsed("one", "p")
				for range 30 {
					for _, reason := range []string{"MPSUnhealthy", "MPSRecovered"} {
						for _, ref := range refs {
							r.Tell(ctx, Event{Claim: ref, Reason: reason, Subjects: []string{"A"}, Text: "text"})
						}
					}
					time.Sleep(10 * time.Second)
				}
				r.Warn(ctx, victim, "PartitionGone", "text")
				n.wantWithin(t, time.Minute, "PartitionGone")
				after(4 * time.Hour)
			})
		})
	}
}

// TestRefusedTenant: what is refused of a tenant, in whatever words, does not delay what failed once of others.
func TestRefusedTenant(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		var bad atomic.Bool
		n.Refuse(func(r *http.Request) *apierrors.StatusError {
			switch {
			case r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/namespaces/hostile/"):
				return apierrors.NewForbidden(corev1.Resource("events"), "x", errors.New("status unknown for quota: q, resources: count/events"))
			case r.Method == http.MethodPost && bad.Load():
				return apierrors.NewInternalError(errors.New("etcdserver: leader changed"))
			}
			return nil
		})
		for _, ref := range n.hostile(300) {
			r.Warn(ctx, ref, "MPSServerLost", "text")
		}
		after(10 * time.Minute)
		bad.Store(true)
		r.Warn(ctx, n.setUsed("one", "p"), "PartitionGone", "text")
		after(10 * time.Second)
		bad.Store(false)
		n.wantWithin(t, time.Minute, "PartitionGone")
		after(2 * time.Hour)
	})
}

// TestLookUpsThatFail: each answer counts, so that many claims are told although a request fails now and then.
func TestLookUpsThatFail(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		var gets atomic.Int64
		n.Refuse(func(r *http.Request) *apierrors.StatusError {
			if r.Method == http.MethodGet && gets.Add(1)%20 == 0 {
				return apierrors.NewInternalError(errors.New("etcdserver: leader changed"))
			}
			return nil
		})
		var all []Event
		for i := range 100 {
			all = append(all, Event{Claim: n.setUsed(fmt.Sprintf("c%d", i), fmt.Sprintf("p%d", i)), Reason: "Hit", Text: "text"})
		}
		r.Tell(ctx, all...)
		after(10 * time.Minute)
		if got, _ := n.count("Hit"); got != 200 {
			t.Errorf("%d of 200 events, %d look-ups", got, gets.Load())
		}
	})
}

// TestFlapsThenLost: a GPU comes and goes until the limits are against telling it. What holds then is told soon.
func TestFlapsThenLost(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		notifier := NewNotifier(r.Tell)
		lost := []Statement{{Key: 1, Event: Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"}}}
		over := func(Statement) (Event, bool) {
			return Event{Type: corev1.EventTypeNormal, Reason: "GPURecovered", Subjects: []string{oneGPU}, Text: "the GPU is back"}, true
		}
		for range 10 {
			notifier.Set(ctx, "source", lost, over)
			after(5 * time.Second)
			notifier.Set(ctx, "source", nil, over)
			after(5 * time.Second)
		}
		notifier.Set(ctx, "source", lost, over)
		after(time.Minute)
		var last corev1.Event
		for _, e := range n.Events() {
			if !e.LastTimestamp.Before(&last.LastTimestamp) {
				last = e
			}
		}
		if last.Reason != "GPULost" {
			t.Errorf("the GPU is lost, and the last event is %s", last.Reason)
		}
	})
}

// TestProxy: a 404 that is not the API server's says nothing.
func TestProxy(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		var away atomic.Bool
		away.Store(true)
		n.fault = func(*http.Request) error {
			if !away.Load() {
				return nil
			}
			return apierrors.NewGenericServerResponse(http.StatusNotFound, "POST", corev1.Resource("events"), "", "404 page not found", 0, true)
		}
		r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"})
		after(time.Minute)
		away.Store(false)
		after(5 * time.Minute)
		if got, _ := n.count("GPULost"); got != 1 {
			t.Errorf("%d events", got)
		}
	})
}
