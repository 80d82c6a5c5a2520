// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/partage-dev/partage/pkg/claim"
)

func TestEvents(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	events := NewEvents(t.Context(), clusterAt(t, api.URL()).client, testDriver, testNode)
	one := claim.Ref{Namespace: "team", Name: "one", UID: "uid-1"}
	events.Warn(t.Context(), one, "Damaged", "its record cannot be read")
	events.Warn(t.Context(), claim.Ref{UID: "uid-2"}, "Damaged", "its record cannot be read")
	// With the same reason, and still two things to know.
	events.Warn(t.Context(), claim.Ref{}, "GPULost", "GPU 0000:1b:00.0: gone")
	events.Warn(t.Context(), claim.Ref{}, "GPULost", "GPU 0000:2c:00.0: gone")
	events.Warn(t.Context(), claim.Ref{}, "Long", strings.Repeat("x", 2000))
	// What was cut through would not be text any more.
	events.Warn(t.Context(), claim.Ref{}, "Foreign", strings.Repeat("ü", 1000))

	want := []string{
		"team/ResourceClaim/one (uid-1) in team: Damaged: its record cannot be read",
		"/Node/node-1 (node-1) in default: Damaged: Claim with UID uid-2: its record cannot be read",
		"/Node/node-1 (node-1) in default: GPULost: GPU 0000:1b:00.0: gone",
		"/Node/node-1 (node-1) in default: GPULost: GPU 0000:2c:00.0: gone",
		"/Node/node-1 (node-1) in default: Long: " + strings.Repeat("x", 1021) + "...",
		"/Node/node-1 (node-1) in default: Foreign: " + strings.Repeat("ü", 510) + "...",
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
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v, events (-want +got):\n%s", err, diff)
	}
}

// TestRepeatedEvents: what is observed again, with other process IDs or after
// another time, is one event with the last message.
func TestRepeatedEvents(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	events := NewEvents(t.Context(), clusterAt(t, api.URL()).client, testDriver, testNode)
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
	var diff string
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		var got []string
		for _, e := range api.Events() {
			got = append(got, fmt.Sprintf("%s: %s %d: %s", e.InvolvedObject.Name, e.Reason, e.Count, e.Message))
		}
		diff = cmp.Diff(want, got)
		return diff == "", nil
	})
	if err != nil {
		t.Errorf("events (-want +got):\n%s", diff)
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
