// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"slices"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// wantNoContainer fails unless the hooks of a container refuse it and say why.
func wantNoContainer(t testing.TB, n *harness.Node, spec *oci.Spec, texts ...string) {
	t.Helper()
	_, err := n.NewProgram(t.Context(), t, spec, "info")
	if err == nil {
		t.Error("the container starts")
		return
	}
	for _, text := range texts {
		expect.Contains(t, err.Error(), text, err)
	}
}

// TestHookRefusesTwoShares checks that no container gets two MPS shares: a program is a
// client of one daemon, and would use the other share without limits, or not at all.
func TestHookRefusesTwoShares(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.StartSupervisor(t)
	p := n.Start(t)
	one := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}}))
	other := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 1, Kind: harness.MPS}}))
	same := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}}))
	wantNoContainer(t, n, n.Container(t, slices.Concat(one, other)...), "one MPS share")
	wantNoContainer(t, n, n.Container(t, slices.Concat(one, same)...), "one MPS share")
	for _, ids := range [][]string{one, other, same} {
		wantOutput(t, n, n.Container(t, ids...), []string{"as a client"}, "info")
	}
}

// TestHookRefusesDeadDaemon checks that no container starts whose daemon is dead: its
// program would have no limits.
func TestHookRefusesDeadDaemon(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	s := n.StartSupervisor(t)
	p := n.Start(t)
	c, ids := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	wantOutput(t, n, n.Container(t, ids...), []string{"as a client"}, "info")
	s.Kill()
	must.Do(t, n.KillMPS())
	// A process that was killed can be found no more before its sockets are closed.
	starts := n.CheckContainerStarts(t, ids)
	p.Until(t, "the end of the daemon's socket", func(ctx context.Context) error {
		if starts(ctx) == nil {
			return errors.New("a container starts")
		}
		return nil
	})
	wantNoContainer(t, n, n.Container(t, ids...), n.DeviceName(t, 0, "", 0))
	n.StartSupervisor(t)
	p.Until(t, "the daemon", n.CheckContainerStarts(t, ids))
	p.MustUnprepare(t, c)
	p.UntilClean(t, n)
}
