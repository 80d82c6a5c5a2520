// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// TestEventsNameNoOtherTenant: the events of a claim and of its pods have nothing of other namespaces; those of the node have it.
func TestEventsNameNoOtherTenant(t *testing.T) {
	t.Parallel()
	inNetwork(t, func(ctx context.Context, t *testing.T, n *network, r *Recorder) {
		t.Helper()
		const text = "it is kept by claim victim/secret (0b6f4f5e-0000-4000-8000-000000000002) and process 5 (train, pod victim/secret, container 01)\u202e"
		ours := n.setUsed("ours", "pod-of-ours")
		for _, about := range []claim.Ref{{}, ours} {
			r.Warn(ctx, about, "Kept", text)
		}
		after(time.Minute)
		all := n.Events()
		if len(all) != 3 {
			t.Fatalf("%d events, want 3: %+v", len(all), all)
		}
		for _, e := range all {
			isOfNode, names := e.Namespace == corev1.NamespaceDefault, strings.Contains(e.Message, "victim") && strings.Contains(e.Message, "0b6f4f5e")
			if isOfNode != names || !strings.HasSuffix(e.Message, `\u202e`) {
				t.Errorf("event about %s: %s", e.InvolvedObject.Kind, e.Message)
			}
		}
	})
}
