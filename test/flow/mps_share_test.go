// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Values of nvmlComputeMode_t.
const (
	defaultMode      = 0
	exclusiveProcess = 3
)

// wantMode fails unless a whole GPU has this compute mode.
func (n *node) wantMode(t testing.TB, gpu, mode int) {
	t.Helper()
	if got := n.machine(t).GPUs[gpu].ComputeMode; got != mode {
		t.Errorf("GPU %d has compute mode %d, want %d", gpu, got, mode)
	}
}

// servers are the processes of MPS servers on a GPU.
func (n *node) servers(t testing.TB, gpu int) []int {
	t.Helper()
	var pids []int
	for _, p := range n.machine(t).Processes {
		if p.GPU == gpu && p.Kind == machine.MPSServer {
			pids = append(pids, p.PID)
		}
	}
	slices.Sort(pids)
	return pids
}

// wantSays fails unless the program succeeds in a container and says all of these.
func (n *node) wantSays(t testing.TB, spec *oci.Spec, texts []string, args ...string) {
	t.Helper()
	out, err := n.ask(t, spec, args...)
	if err != nil {
		t.Errorf("cuda-client %v: %v", args, err)
		return
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			t.Errorf("cuda-client %v does not say %q: %s", args, text, out)
		}
	}
}

// wantRefused fails unless the program fails in a container and says so.
func (n *node) wantRefused(t testing.TB, spec *oci.Spec, text string, args ...string) {
	t.Helper()
	out, err := n.ask(t, spec, args...)
	if err == nil {
		t.Errorf("cuda-client %v succeeds: %s", args, out)
	} else if !strings.Contains(err.Error(), text) {
		t.Errorf("cuda-client %v: want %s, got %v", args, text, err)
	}
}

// wantNoRoom fails if a device is prepared beside what others have.
func (n *node) wantNoRoom(t testing.TB, p *process, device request) {
	t.Helper()
	c := n.claim(t, []request{device})
	// It would wait for the others to go.
	if _, err := p.tryPrepare(t.Context(), c, glance); err == nil {
		t.Errorf("%+v was prepared beside what others have", device)
	}
	p.mustUnprepare(t, c)
}

// without is a container whose program has cleared its environment of everything
// that begins like this.
func without(spec *oci.Spec, prefix string) *oci.Spec {
	spec.Process.Env = slices.DeleteFunc(spec.Process.Env, func(entry string) bool { return strings.HasPrefix(entry, prefix) })
	return spec
}

// unreachable is a container whose program cannot reach the daemon.
func unreachable(spec *oci.Spec) *oci.Spec {
	without(spec, "CUDA_MPS_")
	spec.Hooks = nil
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m oci.Mount) bool {
		return m.Destination == "/tmp/nvidia-mps" || m.Destination == "/dev/shm"
	})
	return spec
}

// TestMPSShares: four claims share a GPU, each with its limits, and everything
// else is refused meanwhile.
func TestMPSShares(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	n.startSupervisor(t)
	p := n.start(t)
	p.ready(t)
	pristine := n.traces(t)
	share := request{kind: asMPS, memory: 10 << 30, percent: 25}
	var claims []*drapb.Claim
	var ids [][]string
	for range 4 {
		c := n.claim(t, []request{share})
		claims, ids = append(claims, c), append(ids, p.mustPrepare(t, c))
	}
	n.wantMode(t, 0, exclusiveProcess)
	if servers := n.servers(t, 0); len(servers) != 1 {
		t.Fatalf("servers are %v, want one", servers)
	}
	for _, id := range ids {
		n.wantSays(t, n.container(t, id...), []string{"limit 10240 MiB", "(25 %)", "as a client of an MPS server"}, "info")
		n.wantSays(t, n.container(t, id...), nil, "alloc", "6Gi", "4Gi")
		n.wantRefused(t, n.container(t, id...), "OUT_OF_MEMORY", "alloc", "10Gi", "1Mi")
	}
	n.wantRefused(t, unreachable(n.container(t, ids[0]...)), "DEVICE_UNAVAILABLE", "info")
	for _, other := range []request{{}, {kind: asTimeSlice}, {kind: asMPS}, mig(0, "1g.10gb", 0)} {
		n.wantNoRoom(t, p, other)
	}
	users := []*user{n.use(t, ids[1]...), n.use(t, ids[2]...)}
	for i, c := range []*drapb.Claim{claims[3], claims[0]} {
		p.mustUnprepare(t, c)
		for _, u := range users {
			if err := u.works(); err != nil {
				t.Errorf("after %d releases: %v", i+1, err)
			}
		}
	}
	for _, u := range users {
		u.leave()
	}
	p.mustUnprepare(t, claims[1:3]...)
	p.untilLeft(t, n, pristine)
}

// TestMPSCeiling: a program that does away with its limits has those of the
// largest share of the GPU, which the server holds it to.
func TestMPSCeiling(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	n.startSupervisor(t)
	p := n.start(t)
	small := n.claim(t, []request{{kind: asMPS, memory: 10 << 30, percent: 25}})
	ids := p.mustPrepare(t, small)
	hostile := func(want ...string) {
		t.Helper()
		n.wantSays(t, without(n.container(t, ids...), "CUDA_MPS_"), want, "info")
	}
	hostile("limit 10240 MiB", "(25 %)")
	server := n.servers(t, 0)
	large := n.claim(t, []request{{kind: asMPS, memory: 30 << 30, percent: 50}})
	p.mustPrepare(t, large)
	hostile("limit 30720 MiB", "(50 %)")
	n.wantSays(t, n.container(t, ids...), []string{"limit 10240 MiB", "(25 %)"}, "info")
	p.mustUnprepare(t, large)
	hostile("limit 10240 MiB", "(25 %)")
	if now := n.servers(t, 0); !slices.Equal(now, server) {
		t.Errorf("the server was replaced: %v is now %v", server, now)
	}
	p.mustUnprepare(t, small)
	p.untilClean(t, n)
}
