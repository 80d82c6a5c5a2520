// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"fmt"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestForeignMode checks that a compute mode that an administrator has set is not changed,
// and that the error says how to change it.
func TestForeignMode(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1", func(m *machine.Machine) { m.GPUs[0].ComputeMode = harness.ExclusiveProcess })
	n.StartSupervisor(t)
	p := n.Run(t)
	before := n.Snapshot(t)
	for _, c := range []*drapb.Claim{n.Allocate(t, []harness.Device{{Kind: harness.MPS}}), n.Allocate(t, []harness.Device{{}}, harness.MPSConfig(""))} {
		got := p.Prepare(t, c)[0].GetError()
		for _, want := range []string{n.Address(t, 0), "EXCLUSIVE_PROCESS", "nvidia-smi"} {
			expect.Contains(t, got, want)
		}
		p.MustUnprepare(t, c)
	}
	// It makes no difference to a claim that has the GPU alone.
	whole, _ := p.NewClaim(t, n, harness.Device{})
	p.MustUnprepare(t, whole)
	p.UntilSnapshot(t, n, before)
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].ComputeMode = harness.DefaultMode })
	c, _ := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	p.MustUnprepare(t, c)
	n.WantMode(t, 0, harness.DefaultMode)
}

// TestNoSupervisor checks that without a supervisor only MPS is refused, with a reason.
func TestNoSupervisor(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x3", harness.Frequent...)
	before := n.Snapshot(t)
	// The driver waits for a supervisor for some seconds, for all of them at once.
	refused := []*drapb.Claim{
		n.Allocate(t, []harness.Device{{Kind: harness.MPS}}), n.Allocate(t, []harness.Device{{GPU: 1}}, harness.MPSConfig("")),
		n.Allocate(t, []harness.Device{harness.Partition(2, "1g.10gb", 0)}, harness.PartitionWithMPS),
	}
	for i, answer := range p.Prepare(t, refused...) {
		expect.Contains(t, answer.GetError(), "MPS supervisor", "prepare claim", i, "without a supervisor")
	}
	p.MustUnprepare(t, refused...)
	for _, device := range []harness.Device{{}, {Kind: harness.TimeSlice}, harness.Partition(0, "1g.10gb", 0)} {
		c := n.Allocate(t, []harness.Device{device})
		p.MustPrepare(t, c)
		p.MustUnprepare(t, c)
	}
	p.UntilSnapshot(t, n, before)
}

// TestReleaseWithoutSupervisor checks that pods can end while there is no supervisor, and
// that their sessions are cleaned up once there is one.
func TestReleaseWithoutSupervisor(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t, harness.Frequent...)
	for _, u := range s.users {
		u.Kill()
	}
	s.supervisor.Kill()
	s.p.MustUnprepare(t, s.claims[:]...)
	expect.Len(t, s.n.CDISpecs(t), 0, "CDI files are left")
	for gpu, c := range s.claims {
		if r, err := s.n.Record(c.GetUid()); err != nil || r == nil || r.State != harness.StateReleasing {
			t.Errorf("the journal says %+v of a claim whose session could not be ended (%v)", r, err)
		}
		s.n.WantMode(t, gpu, harness.ExclusiveProcess)
	}
	// Nobody gets the GPU in this state.
	whole := s.n.Allocate(t, []harness.Device{{GPU: 0}})
	if _, err := s.p.TryPrepare(t.Context(), whole, harness.ShortTimeout); err == nil {
		t.Error("a GPU was prepared that an MPS server holds")
	}
	s.supervisor = s.n.StartSupervisor(t)
	s.p.Until(t, "nothing to be left", func(context.Context) error {
		if diff := s.before.Diff(s.n.Snapshot(t)); diff != "" {
			return fmt.Errorf("what is left (-want +got):\n%s", diff)
		}
		return nil
	})
	s.p.MustPrepare(t, whole)
	s.p.MustUnprepare(t, whole)
}
