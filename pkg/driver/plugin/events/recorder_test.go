// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

// requestTime bounds a request.
const requestTime = 10 * time.Second

const (
	driver, node = "gpu.example.com", "node-1"
	oneGPU       = "0000:1b:00.0"
	otherGPU     = "0000:2c:00.0"
)

func ref(name string) claim.Ref {
	return claim.Ref{Namespace: "team", Name: name, UID: types.UID("uid-of-" + name)}
}

// network is an API server with what may go wrong on the way to it, in fake time.
type network struct {
	*fakeapi.Server
	// fault returns what happens to a request instead, or nil.
	fault    func(*http.Request) error
	requests atomic.Int64
}

func (n *network) RoundTrip(r *http.Request) (*http.Response, error) {
	n.requests.Add(1)
	if n.fault != nil {
		if err := n.fault(r); err != nil {
			return nil, err
		}
	}
	return n.Transport().RoundTrip(r)
}

// inNetwork runs a test in fake time.
func inNetwork(t *testing.T, test func(ctx context.Context, t *testing.T, n *network, r *Recorder)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := &network{Server: fakeapi.NewWithoutNetwork(t)}
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
		var clients [2]kubernetes.Interface
		for i := range clients {
			var err error
			// As the plugin's by default.
			if clients[i], err = kubernetes.NewForConfig(&rest.Config{Host: "http://cluster", Transport: n, QPS: 2, Burst: 10, Timeout: requestTime}); err != nil {
				t.Fatal(err)
			}
		}
		test(ctx, t, n, New(ctx, driver, node, clients[0], clients[1]))
		cancel()
		synctest.Wait()
	})
}

// after lets time pass.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// setUsed stores an allocated claim that pods use.
func (n *network) setUsed(name string, pods ...string) claim.Ref {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: ref(name).UID},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p, UID: types.UID("uid-of-" + p)})
	}
	n.SetClaim(c)
	return ref(name)
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

func (n *network) want(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, e := range n.Events() {
		about := e.InvolvedObject
		got = append(got, fmt.Sprintf("%s %s in %s: %d %s %s: %s", about.Kind, about.Name, e.Namespace, e.Count, e.Type, e.Reason, e.Message))
		if e.Source.Component != driver || e.Source.Host != node || e.ReportingController != driver || e.ReportingInstance != node {
			t.Errorf("the event is from %+v, %s, %s", e.Source, e.ReportingController, e.ReportingInstance)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestRecorder(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		one, two, deleted := n.setUsed("one", "p", "q"), n.setUsed("two", "p"), ref("three")
		const cut = "… (cut)"
		r.Tell(ctx,
			Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"},
			Event{Reason: "GPULost", Subjects: []string{otherGPU}, Text: "gone"},
			Event{Reason: "Long", Text: strings.Repeat("ü", 1000)},
			Event{Type: corev1.EventTypeNormal, Reason: "Fine", Text: "text"},
			Event{Claim: claim.Ref{UID: "uid-2"}, Reason: "Damaged", Text: "its record cannot be read"},
			Event{Claim: one, Reason: "Hit", Subjects: []string{"A", "B"}, Text: "it is lost."},
			Event{Claim: two, Reason: "Hit", Subjects: []string{"B", "C"}, Text: "it is lost."},
			Event{Claim: deleted, Reason: "Hit", Subjects: []string{"D"}, Text: "it is lost."},
		)
		call, end := context.WithCancel(ctx)
		r.Warn(call, two, "Gone", "its partition is gone.")
		end() // the event is written nevertheless
		after(10 * time.Second)
		n.want(t,
			"Node node-1 in default: 1 Warning GPULost: GPU "+oneGPU+": gone", "Node node-1 in default: 1 Warning GPULost: GPU "+otherGPU+": gone",
			"Node node-1 in default: 1 Warning Long: "+strings.Repeat("ü", (1024-len(cut))/2)+cut,
			"Node node-1 in default: 1 Normal Fine: text",
			"Node node-1 in default: 1 Warning Damaged: Claim with UID uid-2: its record cannot be read",
			"ResourceClaim one in team: 1 Warning Hit: Devices A, B: it is lost.",
			"ResourceClaim two in team: 1 Warning Hit: Devices B, C: it is lost.",
			"ResourceClaim three in team: 1 Warning Hit: Device D: it is lost.",
			"Pod p in team: 1 Warning Hit: Claim one: Devices A, B: it is lost.",
			"Pod p in team: 1 Warning Hit: Claim two: Devices B, C: it is lost.",
			"Pod q in team: 1 Warning Hit: Claim one: Devices A, B: it is lost.",
			"ResourceClaim two in team: 1 Warning Gone: its partition is gone.",
			"Pod p in team: 1 Warning Gone: Claim two: its partition is gone.",
		)
		for _, e := range n.Events() {
			if about := e.InvolvedObject; about.Kind == "Pod" && (about.UID != types.UID("uid-of-"+about.Name) || about.APIVersion != "v1" || about.Namespace != "team") {
				t.Errorf("event about %+v", about)
			}
		}
		// What is told again is counted, also where the API server has forgotten it.
		r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"})
		after(time.Second)
		if events, times := n.count("GPULost"); events != 2 || times != 3 {
			t.Errorf("%d events, %d times", events, times)
		}
		n.ForgetEvents()
		r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"})
		after(time.Second)
		n.want(t, "Node node-1 in default: 3 Warning GPULost: GPU "+oneGPU+": gone")
	})
}

// TestTenantsDoNotSilenceAlarms: users can make MPS fail as often as they like, and a GPU may be lost again and again.
func TestTenantsDoNotSilenceAlarms(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		const flaps = 1000
		user, start := n.setUsed("one", "p"), time.Now()
		for i := range flaps {
			for _, reason := range []string{"MPSUnhealthy", "MPSRecovered"} {
				r.Tell(ctx, Event{Claim: user, Reason: reason, Subjects: []string{"A"}, Text: "text"}, Event{Reason: reason, Subjects: []string{oneGPU}, Text: "text"})
			}
			r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: fmt.Sprintf("it fell off, says call %d", i)})
			time.Sleep(time.Second)
		}
		before, _ := n.count("GPULost")
		r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{otherGPU}, Text: "it fell off"})
		after(5 * time.Second)
		if got, _ := n.count("GPULost"); got != before+1 {
			t.Errorf("%d events before, %d with that of the other GPU", before, got)
		}
		// Of the node, the claim and the pod, a look-up for two of them, and the other GPU.
		series := int64(2*4 + 1)
		if got, most := n.requests.Load(), series*(10+1+int64(time.Since(start)/(5*time.Minute)))+1; got > most {
			t.Errorf("%d requests in %s, want at most %d", got, time.Since(start), most)
		}
	})
}

// TestQueueOfAlarms: an alarm does not wait for events of the node with other reasons, whose requests hang.
func TestQueueOfAlarms(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		const others = 50
		n.fault = func(r *http.Request) error {
			if r.Body == nil {
				return nil
			}
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			if err == nil && bytes.Contains(body, []byte("GPUOccupied")) {
				<-r.Context().Done()
				err = r.Context().Err()
			}
			return err
		}
		for i := range others {
			r.Tell(ctx, Event{Reason: "GPUOccupied", Subjects: []string{fmt.Sprintf("0000:%02x:00.0", i)}, Text: "text"})
		}
		after(time.Second)
		r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "gone"})
		after(2 * requestTime)
		if got, _ := n.count("GPULost"); got != 1 {
			t.Errorf("%d alarms after %s, while %d other events wait", got, 2*requestTime, others)
		}
	})
}

// TestManyNamespaces: a GPU is lost that claims of more namespaces share than may have queues for good. All are told: events that wait
// for the budget of their client are not given up.
func TestManyNamespaces(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		const namespaces, claims = 2 * maxQueues, 2
		for i := range namespaces {
			for c := range claims {
				r.Warn(ctx, claim.Ref{Namespace: fmt.Sprintf("team-%d", i), Name: fmt.Sprint("c", c), UID: "uid"}, "Gone", "text")
			}
		}
		after(max(2*tooLate, 10*time.Minute))
		if got, _ := n.count("Gone"); got != namespaces*claims {
			t.Errorf("%d of %d events", got, namespaces*claims)
		}
		for _, namespace := range []string{"another", "team-0"} {
			r.Warn(ctx, claim.Ref{Namespace: namespace, Name: "c", UID: "uid"}, "Again", "text")
		}
		after(time.Minute)
		if got, _ := n.count("Again"); got != 2 || len(r.queues) != 2 {
			t.Errorf("%d of 2 events, and %d queues", got, len(r.queues))
		}
	})
}

// TestRefusedEvents: a namespace whose events are refused delays nothing, and those are not tried without end.
func TestRefusedEvents(t *testing.T) {
	t.Parallel()
	cases := 0
	for name, err := range map[string]*apierrors.StatusError{
		"quota":    apierrors.NewForbidden(corev1.Resource("events"), "x", fmt.Errorf("exceeded quota: none, requested: count/events=1")),
		"webhook":  apierrors.NewInternalError(fmt.Errorf("failed calling webhook")),
		"no right": apierrors.NewForbidden(corev1.Resource("events"), "x", fmt.Errorf("no RBAC policy matched")),
	} {
		cases++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
				n.Refuse(func(r *http.Request) *apierrors.StatusError {
					if strings.Contains(r.URL.Path, "/namespaces/hostile/") && r.Method != http.MethodGet {
						return err
					}
					return nil
				})
				for i := range 300 {
					c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "hostile", Name: fmt.Sprintf("c%d", i), UID: "uid"}}
					n.SetClaim(c)
					r.Warn(ctx, claim.Ref{Namespace: "hostile", Name: c.Name, UID: "uid"}, "Damaged", "text")
				}
				r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "it fell off"}, Event{Reason: "MPSUnhealthy", Subjects: []string{oneGPU}, Text: "text"})
				after(2 * time.Second)
				for _, reason := range []string{"GPULost", "MPSUnhealthy"} {
					if got, _ := n.count(reason); got != 1 {
						t.Errorf("%s: %d events", reason, got)
					}
				}
				after(10 * time.Minute)
				r.Warn(ctx, n.setUsed("one", "p"), "Gone", "text")
				after(3 * time.Minute)
				if got, _ := n.count("Gone"); got != 2 {
					t.Errorf("%d of 2 events of another namespace", got)
				}
				after(3 * time.Hour)
				if got := r.Failures(); got < 300 {
					t.Errorf("%d failures are counted", got)
				}
				was := n.requests.Load()
				after(time.Hour)
				if got := n.requests.Load(); got != was || was > 5000 {
					t.Errorf("%d requests, and %d in another hour", was, got-was)
				}
			})
		})
	}
	if cases != 3 {
		t.Errorf("%d cases", cases)
	}
}

// TestOutage: nothing is lost while the API server is away or refuses everything, and nobody storms it.
func TestOutage(t *testing.T) {
	t.Parallel()
	cases := 0
	for name, fault := range map[string]func(r *http.Request) error{
		"unreachable": func(*http.Request) error { return http.ErrServerClosed },
		"hangs":       func(r *http.Request) error { <-r.Context().Done(); return r.Context().Err() },
		"overloaded":  func(*http.Request) error { return apierrors.NewTooManyRequests("later", 0) },
		"new key":     func(*http.Request) error { return apierrors.NewUnauthorized("the token is not known") },
		"no role":     func(*http.Request) error { return apierrors.NewForbidden(corev1.Resource("events"), "x", nil) },
	} {
		cases++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
				const outage, claims = 5 * time.Minute, 20
				var away atomic.Bool
				away.Store(true)
				n.fault = func(r *http.Request) error {
					if away.Load() {
						return fault(r)
					}
					return nil
				}
				for i := range claims {
					r.Warn(ctx, n.setUsed(fmt.Sprintf("c%d", i), fmt.Sprintf("p%d", i)), "MPSServerLost", "its server has ended")
				}
				r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{oneGPU}, Text: "it fell off"}, Event{Reason: "MPSUnhealthy", Text: "text"})
				after(outage)
				if got := n.requests.Load(); len(n.Events()) > 0 || got > (claims+2)*20 {
					t.Errorf("%d events and %d requests during the outage", len(n.Events()), got)
				}
				away.Store(false)
				after(2 * time.Minute)
				for reason, want := range map[string]int{"GPULost": 1, "MPSUnhealthy": 1, "MPSServerLost": 2 * claims} {
					if got, times := n.count(reason); got != want || times != want {
						t.Errorf("%s: %d events, %d times, want %d", reason, got, times, want)
					}
				}
			})
		})
	}
	if cases != 5 {
		t.Errorf("%d cases", cases)
	}
}

// TestMany: all GPUs and claims of a full node are reported.
func TestMany(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		const gpus, perGPU = 16, 7
		for g := range gpus {
			address := fmt.Sprintf("0000:%02x:00.0", g)
			r.Tell(ctx, Event{Reason: "GPULost", Subjects: []string{address}, Text: "it fell off"})
			for i := range perGPU {
				r.Tell(ctx, Event{Reason: "GPUOccupied", Subjects: []string{address}, Text: fmt.Sprintf("partition %d", i)})
				r.Tell(ctx, Event{Claim: n.setUsed(fmt.Sprintf("c%d-%d", g, i), fmt.Sprintf("p%d-%d", g, i)), Reason: "Hit", Text: "text"})
			}
		}
		after(10 * time.Minute)
		for reason, want := range map[string]int{"GPULost": gpus, "GPUOccupied": gpus * perGPU, "Hit": 2 * gpus * perGPU} {
			if got, times := n.count(reason); got != want || times != want {
				t.Errorf("%s: %d events, %d times, want %d", reason, got, times, want)
			}
		}
		if got, most := n.requests.Load(), int64(gpus*(1+perGPU)+3*gpus*perGPU); got > most {
			t.Errorf("%d requests, want at most %d", got, most)
		}
	})
}
