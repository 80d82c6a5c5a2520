// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
)

// wantOutput fails unless the program succeeds in a container and its output has these
// texts.
func wantOutput(t testing.TB, n *harness.Node, spec *oci.Spec, texts []string, args ...string) {
	t.Helper()
	out, err := n.RunProgram(t, spec, args...)
	if err != nil {
		t.Errorf("cuda-client %v: %v", args, err)
		return
	}
	for _, text := range texts {
		expect.Contains(t, out, text, "cuda-client", args)
	}
}

// wantFailure fails unless the program fails in a container and its output has this text.
func wantFailure(t testing.TB, n *harness.Node, spec *oci.Spec, text string, args ...string) {
	t.Helper()
	out, err := n.RunProgram(t, spec, args...)
	if err == nil {
		t.Errorf("cuda-client %v succeeds: %s", args, out)
	} else if !strings.Contains(err.Error(), text) {
		t.Errorf("cuda-client %v: want %s, got %v", args, text, err)
	}
}

// TestMPSShares checks that four claims share a GPU, each with its limits, and that
// everything else is refused meanwhile.
func TestMPSShares(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x1")
	pristine := n.Snapshot(t)
	share := harness.Device{Kind: harness.MPS, Memory: 10 << 30, Percent: 25}
	var claims []*drapb.Claim
	var ids [][]string
	for range 4 {
		c := n.Allocate(t, []harness.Device{share})
		claims, ids = append(claims, c), append(ids, p.MustPrepare(t, c))
	}
	n.WantMode(t, 0, harness.ExclusiveProcess)
	if servers := n.Servers(t, 0); len(servers) != 1 {
		t.Fatalf("servers are %v, want one", servers)
	}
	for _, id := range ids {
		wantOutput(t, n, n.Container(t, id...), []string{"limit 10240 MiB", "(25 %)", "as a client of an MPS server"}, "info")
		wantOutput(t, n, n.Container(t, id...), nil, "alloc", "6Gi", "3582Mi") // and 514 MiB for the context
		wantFailure(t, n, n.Container(t, id...), "OUT_OF_MEMORY", "alloc", "9726Mi", "1Mi")
	}
	wantFailure(t, n, harness.WithoutDaemon(n.Container(t, ids[0]...)), "DEVICE_UNAVAILABLE", "info")
	for _, other := range []harness.Device{{}, {Kind: harness.TimeSlice}, {Kind: harness.MPS}, harness.Partition(0, "1g.10gb", 0)} {
		n.WantNoRoom(t, p, other)
	}
	users := []*harness.Program{n.StartProgram(t, ids[1]...), n.StartProgram(t, ids[2]...)}
	for i, c := range []*drapb.Claim{claims[3], claims[0]} {
		p.MustUnprepare(t, c)
		for _, u := range users {
			expect.Do(t, u.Check(), i+1, "releases")
		}
	}
	for _, u := range users {
		u.Stop()
	}
	p.MustUnprepare(t, claims[1:3]...)
	p.UntilSnapshot(t, n, pristine)
}

// TestMPSCeiling checks that a program that removes its limits still has those of the
// largest share of the GPU, which the server enforces.
func TestMPSCeiling(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t)
	small, ids := p.NewClaim(t, n, harness.Device{Kind: harness.MPS, Memory: 10 << 30, Percent: 25})
	hostile := func(want ...string) {
		t.Helper()
		wantOutput(t, n, harness.WithoutEnv(n.Container(t, ids...), "CUDA_MPS_"), want, "info")
	}
	hostile("limit 10240 MiB", "(25 %)")
	server := n.Servers(t, 0)
	large, _ := p.NewClaim(t, n, harness.Device{Kind: harness.MPS, Memory: 30 << 30, Percent: 50})
	hostile("limit 30720 MiB", "(50 %)")
	wantOutput(t, n, n.Container(t, ids...), []string{"limit 10240 MiB", "(25 %)"}, "info")
	p.MustUnprepare(t, large)
	hostile("limit 10240 MiB", "(25 %)")
	expect.Same(t, n.Servers(t, 0), server, "the server was replaced")
	p.MustUnprepare(t, small)
	p.UntilClean(t, n)
}

func TestMain(m *testing.M) { harness.Main(m) }

// TestTwiceTheEqualPart: with computeOvercommit 2, claims that ask for no percentage are limited
// to twice an equal part, which is what the scheduler has accounted, and never to more than all.
func TestTwiceTheEqualPart(t *testing.T) {
	t.Parallel()
	for clients, want := range map[int]int64{1: 100, 3: 66, 4: 50} {
		t.Run(fmt.Sprintf("%d clients", clients), func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			n.StartSupervisor(t)
			p := n.Run(t, n.Policy(t, fmt.Sprintf("default: {mps: {clients: %d, computeOvercommit: 2}}\n", clients)))
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
