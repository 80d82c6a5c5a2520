// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// TestMPSOnGPUs checks that a claim that owns two GPUs gets one MPS session for both, with
// limits for each by its place in the claim or by UUID.
func TestMPSOnGPUs(t *testing.T) {
	t.Parallel()
	const common = `"defaultActiveThreadPercentage":40,"defaultPinnedDeviceMemoryLimit":"8Gi"`
	for name, test := range map[string]struct {
		settings func(n *harness.Node) string
		want     []string // of the first device and of the second
	}{
		"no limits":   {func(*harness.Node) string { return "" }, []string{"no limit", "no limit"}},
		"one for all": {func(*harness.Node) string { return common }, []string{"limit 8192 MiB", "limit 8192 MiB"}},
		"by place": {func(*harness.Node) string {
			return common + `,"defaultPerDevicePinnedMemoryLimit":{"1":"12Gi"}`
		}, []string{"limit 8192 MiB", "limit 12288 MiB"}},
		"by UUID": {func(n *harness.Node) string {
			return common + fmt.Sprintf(`,"defaultPerDevicePinnedMemoryLimit":{%q:"6Gi"}`, n.Machine(t).GPUs[0].UUID)
		}, []string{"limit 6144 MiB", "limit 8192 MiB"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewMPSDriver(t, "h100x3")
			pristine := n.Snapshot(t)
			c := n.Allocate(t, []harness.Device{{GPU: 0}, {GPU: 2}}, harness.MPSConfig(test.settings(n)))
			ids := p.MustPrepare(t, c)
			for gpu, mode := range []int{harness.ExclusiveProcess, harness.DefaultMode, harness.ExclusiveProcess} {
				n.WantMode(t, gpu, mode)
			}
			if a, b := n.Servers(t, 0), n.Servers(t, 2); len(a) != 1 || !slices.Equal(a, b) {
				t.Errorf("servers are %v and %v, want one for both GPUs", a, b)
			}
			out, err := n.RunProgram(t, n.Container(t, ids...), "info")
			_, second, found := strings.Cut(out, "device 1:")
			if err != nil || !found || !strings.Contains(out, "as a client of an MPS server") {
				t.Fatalf("the program says %s, %v", out, err)
			}
			first := strings.TrimSuffix(out, second)
			for i, part := range []string{first, second} {
				for _, want := range []string{test.want[i], n.Machine(t).GPUs[2*i].UUID} {
					expect.Contains(t, part, want, "device", i, "the program")
				}
			}
			for gpu := range ids {
				wantFailure(t, n, harness.WithoutDaemon(n.Container(t, ids[gpu])), "DEVICE_UNAVAILABLE", "info")
			}
			p.MustUnprepare(t, c)
			p.UntilSnapshot(t, n, pristine)
		})
	}
}

// TestMPSOnPartition checks that a partition has its own session beside those of others.
func TestMPSOnPartition(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Run(t, n.Policy(t, harness.PartitionSharesPolicy))
	pristine := n.Snapshot(t)
	own := n.Allocate(t, []harness.Device{harness.Partition(0, "2g.20gb", 0)}, harness.PartitionWithMPS)
	share := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 6).Shared(harness.MPS)})
	alone := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)})
	ownIDs, shareIDs, aloneIDs := p.MustPrepare(t, own), p.MustPrepare(t, share), p.MustPrepare(t, alone)
	expect.Len(t, n.Servers(t, 0), 2, "servers")
	wantOutput(t, n, n.Container(t, ownIDs...), []string{"limit 4096 MiB", "(50 %)", "as a client"}, "info")
	wantOutput(t, n, n.Container(t, shareIDs...), []string{"limit 4096 MiB", "(25 %)", "as a client"}, "info")
	wantOutput(t, n, n.Container(t, aloneIDs...), []string{"no limit", "OUTSIDE OF MPS"}, "info")
	// No compute mode keeps programs out of a partition that do not find the daemon.
	for _, ids := range [][]string{ownIDs, shareIDs} {
		wantOutput(t, n, harness.WithoutDaemon(n.Container(t, ids...)), []string{"no limit", "OUTSIDE OF MPS"}, "info")
	}
	u := n.StartProgram(t, shareIDs...)
	p.MustUnprepare(t, own, alone)
	expect.Do(t, u.Check())
	u.Stop()
	p.MustUnprepare(t, share)
	p.UntilSnapshot(t, n, pristine)
}

// TestMPSUsers checks that programs of different users run at the same time on shares, and
// on a claim's own GPU where its configuration allows it.
func TestMPSUsers(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	n.StartSupervisor(t)
	p := n.Start(t)
	as := func(spec *oci.Spec, uid uint32) *oci.Spec {
		spec.Process.User.UID = uid
		return spec
	}
	alone := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0}}, harness.MPSConfig("")))
	together := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 1}}, harness.MPSConfig(`"multiUser":true`)))
	one := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 2, Kind: harness.MPS}}))
	other := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 2, Kind: harness.MPS}}))
	for name, pair := range map[string][2][]string{"multi-user": {together, together}, "shares": {one, other}} {
		for i, ids := range pair {
			if _, err := n.TryStartProgram(t.Context(), t, as(n.Container(t, ids...), uint32(1000+i))); err != nil {
				t.Errorf("%s, user %d: %v", name, i, err)
			}
		}
	}
	first := must.Get(n.TryStartProgram(t.Context(), t, as(n.Container(t, alone...), 1000)))(t)
	wantFailure(t, n, as(n.Container(t, alone...), 1001), "no answer", "info", "--timeout=500ms")
	first.Stop()
	wantOutput(t, n, as(n.Container(t, alone...), 1001), []string{"as a client"}, "info")
}
