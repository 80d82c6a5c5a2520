// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"fmt"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestForeignMode: a compute mode that somebody else has set is not touched, and
// says who could do what about it.
func TestForeignMode(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1", func(m *machine.Machine) { m.GPUs[0].ComputeMode = exclusiveProcess })
	n.startSupervisor(t)
	p := n.start(t)
	p.ready(t)
	before := n.traces(t)
	for _, c := range []*drapb.Claim{n.claim(t, []request{{kind: asMPS}}), n.claim(t, []request{{}}, owning(""))} {
		got := p.prepare(t, c)[0].GetError()
		for _, want := range []string{n.address(t, 0), "EXCLUSIVE_PROCESS", "nvidia-smi"} {
			if !strings.Contains(got, want) {
				t.Errorf("the error lacks %q: %s", want, got)
			}
		}
		p.mustUnprepare(t, c)
	}
	// A claim that has the GPU alone does not care.
	whole := n.claim(t, []request{{}})
	p.mustPrepare(t, whole)
	p.mustUnprepare(t, whole)
	p.untilLeft(t, n, before)
	n.update(t, func(m *machine.Machine) { m.GPUs[0].ComputeMode = defaultMode })
	c := n.claim(t, []request{{kind: asMPS}})
	p.mustPrepare(t, c)
	p.mustUnprepare(t, c)
	n.wantMode(t, 0, defaultMode)
}

// TestNoSupervisor: without it MPS is refused with a reason and all else goes on.
func TestNoSupervisor(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x3")
	p := n.start(t, frequent...)
	p.ready(t)
	before := n.traces(t)
	// The driver waits for a supervisor for some seconds, for all of them at once.
	refused := []*drapb.Claim{
		n.claim(t, []request{{kind: asMPS}}), n.claim(t, []request{{gpu: 1}}, owning("")),
		n.claim(t, []request{mig(2, "1g.10gb", 0)}, migMPS),
	}
	for i, answer := range p.prepare(t, refused...) {
		if !strings.Contains(answer.GetError(), "MPS supervisor") {
			t.Errorf("prepare claim %d without a supervisor: %q", i, answer.GetError())
		}
	}
	p.mustUnprepare(t, refused...)
	for _, device := range []request{{}, {kind: asTimeSlice}, mig(0, "1g.10gb", 0)} {
		c := n.claim(t, []request{device})
		p.mustPrepare(t, c)
		p.mustUnprepare(t, c)
	}
	p.untilLeft(t, n, before)
}

// TestReleaseWithoutSupervisor: pods end while there is no supervisor, and what
// they had is cleaned up once there is one.
func TestReleaseWithoutSupervisor(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, frequent...)
	for _, u := range s.users {
		u.end()
	}
	s.supervisor.kill()
	s.p.mustUnprepare(t, s.claims[:]...)
	if left := s.n.cdiSpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	for gpu, c := range s.claims {
		if r, err := s.n.record(c.GetUid()); err != nil || r == nil || r.State != "unpreparing" {
			t.Errorf("the journal says %+v of a claim whose session could not be ended (%v)", r, err)
		}
		s.n.wantMode(t, gpu, exclusiveProcess)
	}
	// Nobody gets the GPU in this state.
	whole := s.n.claim(t, []request{{gpu: 0}})
	if _, err := s.p.tryPrepare(t.Context(), whole, hurry); err == nil {
		t.Error("a GPU was prepared that an MPS server holds")
	}
	s.supervisor = s.n.startSupervisor(t)
	s.p.until(t, "nothing to be left", func(context.Context) error {
		if diff := s.before.diff(s.n.traces(t)); diff != "" {
			return fmt.Errorf("what is left (-want +got):\n%s", diff)
		}
		return nil
	})
	s.p.mustPrepare(t, whole)
	s.p.mustUnprepare(t, whole)
}
