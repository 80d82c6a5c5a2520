// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestTwiceTheEqualPart: with computeOvercommit 2, claims that ask for no percentage are limited
// to twice an equal part, which is what the scheduler has accounted, and never to more than all.
func TestTwiceTheEqualPart(t *testing.T) {
	t.Parallel()
	for clients, want := range map[int]int64{1: 100, 3: 66, 4: 50} {
		t.Run(fmt.Sprintf("%d clients", clients), func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			n.StartSupervisor(t)
			p := n.Start(t, n.Policy(t, fmt.Sprintf("default: {mps: {clients: %d, computeOvercommit: 2}}\n", clients)))
			p.Ready(t)
			published := n.Published()[n.DeviceName(t, 0, "", 0)+"-mps"]
			if got := valueOf(published, "smPercent"); got != 200 {
				t.Errorf("%d %% are published, want 200", got)
			}
			each := defaultOf(published, "smPercent")
			if each != want {
				t.Errorf("a claim that asks for nothing gets %d %%, want %d", each, want)
			}
			var claims []*drapb.Claim
			for range clients {
				c := n.Allocate(t, []harness.Device{{Kind: harness.MPS, Percent: int(each)}})
				ids, limit := p.MustPrepare(t, c), []string{fmt.Sprintf("(%d %%)", want)}
				wantOutput(t, n, n.Container(t, ids...), limit, "info")
				wantOutput(t, n, harness.WithoutEnv(n.Container(t, ids...), "CUDA_MPS_"), limit, "info")
				claims = append(claims, c)
			}
			p.MustUnprepare(t, claims...)
			p.UntilClean(t, n)
		})
	}
}
