// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// owning is the configuration of a claim that owns its GPUs and asks for MPS on
// them.
func owning(settings string) config {
	return config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` + settings + `}}}`)
}

// TestMPSOnGPUs: a claim that owns two GPUs gets one MPS session for both, with
// limits for each, by its place in the claim or by UUID.
func TestMPSOnGPUs(t *testing.T) {
	t.Parallel()
	const common = `"defaultActiveThreadPercentage":40,"defaultPinnedDeviceMemoryLimit":"8Gi"`
	for name, test := range map[string]struct {
		settings func(n *node) string
		want     []string // of the first device and of the second
	}{
		"no limits":   {func(*node) string { return "" }, []string{"no limit", "no limit"}},
		"one for all": {func(*node) string { return common }, []string{"limit 8192 MiB", "limit 8192 MiB"}},
		"by place": {func(*node) string {
			return common + `,"defaultPerDevicePinnedMemoryLimit":{"1":"12Gi"}`
		}, []string{"limit 8192 MiB", "limit 12288 MiB"}},
		"by UUID": {func(n *node) string {
			return common + fmt.Sprintf(`,"defaultPerDevicePinnedMemoryLimit":{%q:"6Gi"}`, n.machine(t).GPUs[0].UUID)
		}, []string{"limit 6144 MiB", "limit 8192 MiB"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x3")
			n.startSupervisor(t)
			p := n.start(t)
			p.ready(t)
			pristine := n.traces(t)
			c := n.claim(t, []request{{gpu: 0}, {gpu: 2}}, owning(test.settings(n)))
			ids := p.mustPrepare(t, c)
			for gpu, mode := range []int{exclusiveProcess, defaultMode, exclusiveProcess} {
				n.wantMode(t, gpu, mode)
			}
			if a, b := n.servers(t, 0), n.servers(t, 2); len(a) != 1 || !slices.Equal(a, b) {
				t.Errorf("servers are %v and %v, want one for both GPUs", a, b)
			}
			out, err := n.ask(t, n.container(t, ids...), "info")
			_, second, found := strings.Cut(out, "device 1:")
			if err != nil || !found || !strings.Contains(out, "as a client of an MPS server") {
				t.Fatalf("the program says %s, %v", out, err)
			}
			first := strings.TrimSuffix(out, second)
			for i, part := range []string{first, second} {
				for _, want := range []string{test.want[i], n.machine(t).GPUs[2*i].UUID} {
					if !strings.Contains(part, want) {
						t.Errorf("device %d: want %q, the program says %s", i, want, part)
					}
				}
			}
			for gpu := range ids {
				n.wantRefused(t, unreachable(n.container(t, ids[gpu])), "DEVICE_UNAVAILABLE", "info")
			}
			p.mustUnprepare(t, c)
			p.untilLeft(t, n, pristine)
		})
	}
}

// TestMPSOnPartition: a partition has a session of its own beside others.
func TestMPSOnPartition(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	n.startSupervisor(t)
	p := n.start(t, n.policy(t, partitionShares))
	p.ready(t)
	pristine := n.traces(t)
	own := n.claim(t, []request{mig(0, "2g.20gb", 0)}, migMPS)
	share := n.claim(t, []request{mig(0, "1g.10gb", 6).shared(asMPS)})
	alone := n.claim(t, []request{mig(0, "1g.10gb", 4)})
	ownIDs, shareIDs, aloneIDs := p.mustPrepare(t, own), p.mustPrepare(t, share), p.mustPrepare(t, alone)
	if servers := n.servers(t, 0); len(servers) != 2 {
		t.Errorf("servers are %v, want two", servers)
	}
	n.wantSays(t, n.container(t, ownIDs...), []string{"limit 4096 MiB", "(50 %)", "as a client"}, "info")
	n.wantSays(t, n.container(t, shareIDs...), []string{"limit 4096 MiB", "(25 %)", "as a client"}, "info")
	n.wantSays(t, n.container(t, aloneIDs...), []string{"no limit", "OUTSIDE OF MPS"}, "info")
	for _, ids := range [][]string{ownIDs, shareIDs} {
		n.wantRefused(t, unreachable(n.container(t, ids...)), "DEVICE_UNAVAILABLE", "info")
	}
	u := n.use(t, shareIDs...)
	p.mustUnprepare(t, own, alone)
	if err := u.works(); err != nil {
		t.Error(err)
	}
	u.leave()
	p.mustUnprepare(t, share)
	p.untilLeft(t, n, pristine)
}

// partitionShares offers everything, and shares of some partitions.
const partitionShares = `default:
  mig:
    shares:
    - profiles: [1g.10gb, 3g.40gb]
      mps: {clients: 4}
      timeslice: {clients: 4}
`

// TestMPSUsers: programs of different users run at the same time where that is
// asked for, and shares are for claims of any user.
func TestMPSUsers(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x3")
	n.startSupervisor(t)
	p := n.start(t)
	as := func(spec *oci.Spec, uid uint32) *oci.Spec {
		spec.Process.User.UID = uid
		return spec
	}
	alone := p.mustPrepare(t, n.claim(t, []request{{gpu: 0}}, owning("")))
	together := p.mustPrepare(t, n.claim(t, []request{{gpu: 1}}, owning(`"multiUser":true`)))
	one := p.mustPrepare(t, n.claim(t, []request{{gpu: 2, kind: asMPS}}))
	other := p.mustPrepare(t, n.claim(t, []request{{gpu: 2, kind: asMPS}}))
	for name, pair := range map[string][2][]string{"multi-user": {together, together}, "shares": {one, other}} {
		for i, ids := range pair {
			if _, err := n.tryUse(t.Context(), t, as(n.container(t, ids...), uint32(1000+i))); err != nil {
				t.Errorf("%s, user %d: %v", name, i, err)
			}
		}
	}
	first, err := n.tryUse(t.Context(), t, as(n.container(t, alone...), 1000))
	if err != nil {
		t.Fatal(err)
	}
	n.wantRefused(t, as(n.container(t, alone...), 1001), "no answer", "info", "--timeout=500ms")
	first.leave()
	n.wantSays(t, as(n.container(t, alone...), 1001), []string{"as a client"}, "info")
}
