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
