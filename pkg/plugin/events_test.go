// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
)

// newEvents makes Events with clients that may ask without end.
func newEvents(t *testing.T, api *apiServer) *Events {
	t.Helper()
	client := clusterAt(t, api.URL()).client
	return NewEvents(t.Context(), client, client, testDriver, testNode)
}

func TestEvents(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	events := newEvents(t, api)
	one := claim.Ref{Namespace: "team", Name: "one", UID: "uid-1"}
	events.Warn(t.Context(), one, "Damaged", "its record cannot be read")
	events.Warn(t.Context(), claim.Ref{UID: "uid-2"}, "Damaged", "its record cannot be read")
	// With the same reason, and still two things to know.
	events.Warn(t.Context(), claim.Ref{}, "GPULost", "GPU 0000:1b:00.0: gone")
	events.Warn(t.Context(), claim.Ref{}, "GPULost", "GPU 0000:2c:00.0: gone")
	events.Warn(t.Context(), claim.Ref{}, "Long", strings.Repeat("x", 2000))
	// What was cut through would not be text any more.
	events.Warn(t.Context(), claim.Ref{}, "Foreign", strings.Repeat("ü", 1000))

	const cut = "… (cut)"
	want := []string{
		"team/ResourceClaim/one (uid-1) in team: Damaged: its record cannot be read",
		"/Node/node-1 (node-1) in default: Damaged: Claim with UID uid-2: its record cannot be read",
		"/Node/node-1 (node-1) in default: GPULost: GPU 0000:1b:00.0: gone",
		"/Node/node-1 (node-1) in default: GPULost: GPU 0000:2c:00.0: gone",
		"/Node/node-1 (node-1) in default: Long: " + strings.Repeat("x", 1024-len(cut)) + cut,
		"/Node/node-1 (node-1) in default: Foreign: " + strings.Repeat("ü", (1024-len(cut))/2) + cut,
	}
	var got []string
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		got = nil
		for _, e := range api.Events() {
			about := e.InvolvedObject
			got = append(got, fmt.Sprintf("%s/%s/%s (%s) in %s: %s: %s", about.Namespace, about.Kind, about.Name, about.UID, e.Namespace, e.Reason, e.Message))
			if e.Type != "Warning" || e.Source.Component != testDriver {
				t.Errorf("event of type %q from %q", e.Type, e.Source.Component)
			}
		}
		return len(got) >= len(want), nil
	})
	// Events of claims and of the node do not wait for each other.
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v, events (-want +got):\n%s", err, diff)
	}
}

// TestRepeatedEvents: what is observed again, with other process IDs or after
// another time, is one event with the last message.
func TestRepeatedEvents(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	events := newEvents(t, api)
	one := claim.Ref{Namespace: "team", Name: "one", UID: "uid-1"}
	two := claim.Ref{Namespace: "team", Name: "two", UID: "uid-2"}
	type event struct {
		ref             claim.Ref
		reason, message string
	}
	for _, e := range []event{
		{one, "OrphanedClaimInUse", "it is kept, because processes use its devices: [41 42]"},
		{one, "OrphanedClaimInUse", "it is kept, because processes use its devices: [43]"},
		{two, "OrphanedClaimInUse", "it is kept, because processes use its devices: [43]"},
		{one, "MPSServerLost", "GPU 0000:1b:00.0: the server with PID 17 has ended"},
		{one, "MPSServerLost", "GPU 0000:1b:00.0: the server with PID 18 has ended"},
		{one, "MPSServerLost", "GPU 0000:2c:00.0: the server with PID 18 has ended"},
		{claim.Ref{}, "GPUUnresponsive", "GPU 0000:1b:00.0: it is in use by process 7 and has not answered for 1m0s."},
		{claim.Ref{}, "GPUUnresponsive", "GPU 0000:1b:00.0: it is in use by processes 8 9 and has not answered for 2m30s."},
		{claim.Ref{}, "GPUUnresponsive", "GPU 0000:1b:00.0: it is in use by process 7 and has not answered for 1h0m0s."},
	} {
		events.Warn(t.Context(), e.ref, e.reason, e.message)
	}
	want := []string{
		"one: OrphanedClaimInUse 2: it is kept, because processes use its devices: [43]",
		"two: OrphanedClaimInUse 1: it is kept, because processes use its devices: [43]",
		"one: MPSServerLost 2: GPU 0000:1b:00.0: the server with PID 18 has ended",
		"one: MPSServerLost 1: GPU 0000:2c:00.0: the server with PID 18 has ended",
		"node-1: GPUUnresponsive 3: GPU 0000:1b:00.0: it is in use by process 7 and has not answered for 1h0m0s.",
	}
	slices.Sort(want)
	var diff string
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		var got []string
		for _, e := range api.Events() {
			got = append(got, fmt.Sprintf("%s: %s %d: %s", e.InvolvedObject.Name, e.Reason, e.Count, e.Message))
		}
		slices.Sort(got)
		diff = cmp.Diff(want, got)
		return diff == "", nil
	})
	if err != nil {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// pod is how a claim says that a pod uses it.
func pod(name string) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID("uid-of-" + name)}
}

// setUsed stores an allocated claim that pods use.
func setUsed(api *apiServer, name string, pods ...string) claim.Ref {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-of-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, pod(p))
	}
	api.SetClaim(c)
	return claim.Ref{Namespace: "team", Name: name, UID: c.UID}
}

// untilEvents waits for events, in any order, each as "kind/name: count reason: message".
func untilEvents(t *testing.T, api *apiServer, want []string) {
	t.Helper()
	slices.Sort(want)
	var diff string
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		var got []string
		for _, e := range api.Events() {
			about := e.InvolvedObject
			got = append(got, fmt.Sprintf("%s/%s: %d %s %s: %s", about.Kind, about.Name, e.Count, e.Type, e.Reason, e.Message))
		}
		slices.Sort(got)
		diff = cmp.Diff(want, got)
		return diff == "", nil
	})
	if err != nil {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestEventsForUsers: claims, and the pods for which they are reserved, hear of their
// devices. A pod hears once what is the same for several claims.
func TestEventsForUsers(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	one, two, deleted := setUsed(api, "one", "p", "q"), setUsed(api, "two", "p"), claim.Ref{Namespace: "team", Name: "three", UID: "uid-3"}
	elsewhere := setUsed(api, "four")
	claimEvents := func(ref claim.Ref, text string, devices ...string) ClaimEvent {
		return ClaimEvent{Claim: ref, Type: corev1.EventTypeWarning, Reason: "GPULost", Devices: devices, Text: text}
	}
	events := newEvents(t, api)
	events.ClaimEvents(t.Context(), []ClaimEvent{
		claimEvents(one, "it is lost.", "A", "B"), claimEvents(two, "it is lost.", "B", "C"), claimEvents(deleted, "it is lost.", "D"), claimEvents(elsewhere, "it is lost.", "E"),
	})
	events.WarnUsers(t.Context(), two, "PartitionGone", "Device B: its partition is gone.")
	untilEvents(t, api, []string{
		"ResourceClaim/one: 1 Warning GPULost: Devices A, B: it is lost.",
		"ResourceClaim/two: 1 Warning GPULost: Devices B, C: it is lost.",
		"ResourceClaim/four: 1 Warning GPULost: Device E: it is lost.",
		"Pod/p: 1 Warning GPULost: Devices A, B, C of claims one, two: it is lost.",
		"Pod/q: 1 Warning GPULost: Devices A, B of claim one: it is lost.",
		"ResourceClaim/two: 1 Warning PartitionGone: Device B: its partition is gone.",
		"Pod/p: 1 Warning PartitionGone: Claim two: Device B: its partition is gone.",
	})
	for _, e := range api.Events() {
		if about := e.InvolvedObject; about.Kind == "Pod" && (about.UID != types.UID("uid-of-"+about.Name) || about.APIVersion != "v1" || about.Namespace != "team") {
			t.Errorf("event about %+v", about)
		}
	}
}

// TestEventsAfterRestart: a plugin that starts anew finds the same, and that is not new.
// What it repeats later is counted on.
func TestEventsAfterRestart(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	one := setUsed(api, "one", "p")
	report := func(after string) {
		t.Helper()
		events := newEvents(t, api)
		claims := &fakeClaims{live: []claim.LiveClaim{uses(one, "A", firstGPU, nil)}}
		r := conditionReporter{events: events, claims: claims}
		r.report(t.Context(), device.Status{Conditions: []device.Condition{
			{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: "GPU " + firstGPU + ": process 42 has not answered for " + after},
		}})
	}
	const admin, users = "If this lasts, see whether the NVIDIA driver is loaded and whether the kernel log has XID errors, " +
		"then reset the GPU or restart the node.", "Processes that use it may hang. If this lasts, " + anotherDevice + "."
	for _, after := range []string{"30s", "1m0s", "2h0m0s"} {
		report(after)
		untilEvents(t, api, []string{
			"Node/node-1: 1 Warning GPUUnresponsive: GPU " + firstGPU + ": process 42 has not answered for " + after + ". " + admin,
			"ResourceClaim/one: 1 Warning GPUUnresponsive: Device A: the GPU does not answer (process 42 has not answered for " + after + "). " + users,
			"Pod/p: 1 Warning GPUUnresponsive: Device A of claim one: the GPU does not answer (process 42 has not answered for " + after + "). " + users,
		})
	}
	api.ForgetEvents()
	report("3h0m0s")
	untilEvents(t, api, []string{
		"Node/node-1: 1 Warning GPUUnresponsive: GPU " + firstGPU + ": process 42 has not answered for 3h0m0s. " + admin,
		"ResourceClaim/one: 1 Warning GPUUnresponsive: Device A: the GPU does not answer (process 42 has not answered for 3h0m0s). " + users,
		"Pod/p: 1 Warning GPUUnresponsive: Device A of claim one: the GPU does not answer (process 42 has not answered for 3h0m0s). " + users,
	})
}

// TestEventsOfFullNode: all GPUs of a node with as many claims as it can have are lost.
func TestEventsOfFullNode(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	var requests atomic.Int64
	api.Refuse(func(*http.Request) *apierrors.StatusError { requests.Add(1); return nil })
	events := newEvents(t, api)
	claims := &fakeClaims{}
	r := conditionReporter{events: events, claims: claims}
	const gpus, perGPU = 8, 7
	var status device.Status
	for n := range gpus {
		address := fmt.Sprintf("0000:%02x:00.0", n)
		status.Conditions = append(status.Conditions, device.Condition{PCIAddress: address, Reason: device.Lost, Message: "it fell off"})
		for i := range perGPU {
			name := fmt.Sprintf("c%d-%d", n, i)
			claims.live = append(claims.live, uses(setUsed(api, name, "p"+name), name, address, nil))
		}
	}
	// As at every poll.
	for range 10 {
		r.report(t.Context(), status)
	}
	const want = gpus + 2*gpus*perGPU
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		return len(api.Events()) >= want, nil
	})
	told := map[string]int{}
	for _, e := range api.Events() {
		told[e.InvolvedObject.Kind+"/"+e.InvolvedObject.Name] += int(e.Count)
	}
	for about, times := range told {
		if kind, _, _ := strings.Cut(about, "/"); kind != "Node" && times != 1 {
			t.Errorf("%s was told %d times", about, times)
		}
	}
	t.Logf("%d requests for %d GPUs and %d claims", requests.Load(), gpus, gpus*perGPU)
	// One for each event, and one for the pods of each claim.
	if got := int(requests.Load()); err != nil || len(told) != 1+2*gpus*perGPU || got > want+gpus*perGPU {
		t.Errorf("%v, %d objects were told with %d requests", err, len(told), got)
	}
}

// TestEventsOutliveOutages: what the API server does not take is tried again.
func TestEventsOutliveOutages(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	events := newEvents(t, api)
	var refused atomic.Int32
	api.Refuse(func(r *http.Request) *apierrors.StatusError {
		if strings.Contains(r.URL.Path, "/events") && refused.Add(1) == 1 {
			return apierrors.NewServiceUnavailable("starting")
		}
		return nil
	})
	events.Node(t.Context(), corev1.EventTypeNormal, "One", "one")
	events.Node(t.Context(), corev1.EventTypeNormal, "Two", "two")
	untilEvents(t, api, []string{"Node/node-1: 1 Normal One: one", "Node/node-1: 1 Normal Two: two"})
}

func TestEventName(t *testing.T) {
	t.Parallel()
	event := func(name, message string) *corev1.Event {
		return &corev1.Event{InvolvedObject: corev1.ObjectReference{Name: name}, Message: message}
	}
	long := strings.Repeat("a-", 126)
	for _, e := range []*corev1.Event{event("one", "text"), event(long, "text"), event(strings.Repeat("a.", 126), "text")} {
		if problems := validation.IsDNS1123Subdomain(eventName(e)); len(problems) > 0 {
			t.Errorf("%s: %v", eventName(e), problems)
		}
	}
	if eventName(event("one", "text")) == eventName(event("one", "other")) || eventName(event(long, "text")) == eventName(event(long+"b", "text")) {
		t.Error("different events have the same name")
	}
}

func TestStableText(t *testing.T) {
	t.Parallel()
	for _, same := range [][]string{
		{"in use by process 42", "in use by processes 42 43", "in use by processes 1, 2, 3, 4, 5, 6, 7."},
		{"it had PID 42 and has ended", "it had PID 4 and has ended"},
		{"no answer for 10s", "no answer for 1m10.5s"},
	} {
		for _, message := range same[1:] {
			if a, b := stableText(same[0]), stableText(message); a != b {
				t.Errorf("%q and %q give %q and %q", same[0], message, a, b)
			}
		}
	}
	for _, different := range [][2]string{
		{"GPU 0000:1b:00.0: lost", "GPU 0000:1c:00.0: lost"},
		{"partition MIG-1", "partition MIG-2"},
		{"device gpu-0000-1b-00-0-mig-1g10gb-4", "device gpu-0000-1b-00-0-mig-1g10gb-5"},
		{"process 42 uses memory slices of the GPU from 4 on", "process 42 uses memory slices of the GPU from 5 on"},
	} {
		if a, b := stableText(different[0]), stableText(different[1]); a == b {
			t.Errorf("%q and %q both give %q", different[0], different[1], a)
		}
	}
}
