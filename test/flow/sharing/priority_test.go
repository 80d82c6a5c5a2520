// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

const (
	normal      = "as a client of an MPS server"
	belowNormal = "as a client of an MPS server, with priority 1 [BELOW NORMAL]"
)

var batch = harness.MPSConfig(`"defaultClientPriority":"BelowNormal"`)

// wantToRun fails unless the program runs in this way.
func wantToRun(t testing.TB, n *harness.Node, spec *oci.Spec, how string) {
	t.Helper()
	out, err := n.RunProgram(t, spec, "info")
	if _, runs, _ := strings.Cut(strings.TrimSpace(out), "runs: "); err != nil || runs != how {
		t.Errorf("the program runs %q (%v), want %q", runs, err, how)
	}
}

// TestClientPriority: a claim for batch work shares a GPU with others and has a lower priority
// than they. That is advice: what a program says itself counts.
func TestClientPriority(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x1")
	pristine := n.Snapshot(t)
	share := []harness.Device{{Kind: harness.MPS}}
	low := n.Allocate(t, share, batch)
	lowIDs := p.MustPrepare(t, low)
	server := n.Servers(t, 0)
	wantToRun(t, n, n.Container(t, lowIDs...), belowNormal)
	wantToRun(t, n, harness.WithoutEnv(n.Container(t, lowIDs...), "CUDA_MPS_"), belowNormal)

	online := n.Allocate(t, share)
	onlineIDs := p.MustPrepare(t, online)
	wantToRun(t, n, n.Container(t, onlineIDs...), normal)
	wantToRun(t, n, n.Container(t, lowIDs...), belowNormal)
	wantToRun(t, n, harness.WithoutEnv(n.Container(t, lowIDs...), "CUDA_MPS_"), normal)

	p.MustUnprepare(t, online)
	wantToRun(t, n, harness.WithoutEnv(n.Container(t, lowIDs...), "CUDA_MPS_"), belowNormal)
	expect.Same(t, n.Servers(t, 0), server, "the server was replaced")
	p.MustUnprepare(t, low)
	p.UntilSnapshot(t, n, pristine)
}

// TestClientPriorityOfPolicy: the policy has a priority for claims that do not ask for one.
func TestClientPriorityOfPolicy(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t, n.Policy(t, "default: {mps: {clientPriority: BelowNormal}}\n"))
	share := []harness.Device{{Kind: harness.MPS}}
	low := n.Allocate(t, share)
	wantToRun(t, n, n.Container(t, p.MustPrepare(t, low)...), belowNormal)
	online := n.Allocate(t, share, harness.MPSConfig(`"defaultClientPriority":"Normal"`))
	wantToRun(t, n, n.Container(t, p.MustPrepare(t, online)...), normal)
	p.MustUnprepare(t, low, online)

	// The policy is for shares.
	own := n.Allocate(t, []harness.Device{{}}, harness.MPSConfig(""))
	wantToRun(t, n, n.Container(t, p.MustPrepare(t, own)...), normal)
	p.MustUnprepare(t, own)
	own = n.Allocate(t, []harness.Device{{}}, batch)
	wantToRun(t, n, n.Container(t, p.MustPrepare(t, own)...), belowNormal)
	p.MustUnprepare(t, own)
	p.UntilClean(t, n)
}

// TestNoClientPriorities: where MPS has no priorities, a claim for one is refused with a reason,
// and others are served.
func TestNoClientPriorities(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1", func(m *machine.Machine) { m.MPS.NoPriorities = true })
	n.StartSupervisor(t)
	p := n.Run(t)
	pristine := n.Snapshot(t)
	refuse := func(devices []harness.Device) {
		t.Helper()
		c := n.Allocate(t, devices, batch)
		got := p.Prepare(t, c)[0].GetError()
		for _, want := range []string{"has no client priorities", "set_default_client_priority", "use a newer driver", "defaultClientPriority"} {
			expect.Contains(t, got, want)
		}
		p.MustUnprepare(t, c)
	}
	refuse([]harness.Device{{}})
	share := []harness.Device{{Kind: harness.MPS}}
	refuse(share)
	p.UntilSnapshot(t, n, pristine)

	c := n.Allocate(t, share)
	ids := p.MustPrepare(t, c)
	wantToRun(t, n, n.Container(t, ids...), normal)
	user := n.StartProgram(t, ids...)
	refuse(share)
	expect.Do(t, user.Check(), "a claim that was refused has harmed another")
	user.Stop()
	p.MustUnprepare(t, c)
	p.UntilSnapshot(t, n, pristine)
}
