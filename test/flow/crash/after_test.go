// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"slices"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// crashContinuation is what happens after a crash, with another process, until
// nothing of the claims is left.
type crashContinuation struct {
	name string
	run  func(t *testing.T, s *crashScene)
}

var crashContinuations = []crashContinuation{
	// The kubelet calls again, or another pod has the same claim.
	{"prepare", func(t *testing.T, s *crashScene) {
		p := s.start(t, harness.Quiet)
		s.prepareAll(t, p)
		p.MustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	// The pod was deleted.
	{"unprepare", func(t *testing.T, s *crashScene) {
		p := s.start(t, harness.Quiet)
		s.settle(t, p)
		p.MustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	{"unprepare at once", func(t *testing.T, s *crashScene) {
		p := s.start(t, harness.Quiet)
		p.MustUnprepare(t, s.claims...)
		// The driver may not know the GPUs yet when it is asked.
		s.untilWithout(t, p)
	}},
	// The claim was deleted and nobody calls.
	{"deleted", func(t *testing.T, s *crashScene) {
		for _, c := range s.claims {
			s.n.API.DeleteClaim(c.GetNamespace(), c.GetName())
		}
		s.untilWithout(t, s.start(t, harness.Eager))
	}},
	// The node went down as well. The kubelet prepares all claims again.
	{"reboot", func(t *testing.T, s *crashScene) {
		s.reboot(t)
		p := s.start(t, harness.Quiet)
		s.prepareBeside(t, p)
		s.prepareAll(t, p)
		p.MustUnprepare(t, slices.Concat(s.claims, s.beside)...)
		s.wantLeft(t, p, s.pristine)
		s.prepareBeside(t, p)
	}},
}

// reboot takes the node down and up again.
func (s *crashScene) reboot(t *testing.T) {
	t.Helper()
	if s.supervisor != nil {
		s.supervisor.Kill()
	}
	s.n.Reboot(t)
	if s.layout.supervised {
		s.supervisor = s.n.StartSupervisor(s.t)
	}
}

// prepareAll prepares the claims in one call and checks what containers get.
func (s *crashScene) prepareAll(t *testing.T, p *harness.Driver) {
	t.Helper()
	answers := p.Prepare(t, s.claims...)
	m := s.n.Machine(t)
	for i, answer := range answers {
		if answer.GetError() != "" {
			t.Fatalf("prepare claim %d: %s", i, answer.GetError())
		}
		ids := harness.WithoutMetadata(harness.CDIIDs(answer))
		if len(ids) != len(s.layout.claims[i]) {
			t.Fatalf("claim %d has %d devices and the CDI ids %v", i, len(s.layout.claims[i]), ids)
		}
		for j, d := range s.layout.claims[i] {
			if err := s.n.CheckDevice(s.claims[i].GetUid(), ids[j], d, &m.GPUs[d.GPU]); err != nil {
				t.Errorf("claim %d, device %v: %v", i, d, err)
			}
		}
		if err := s.checkSharing(t, i, ids); err != nil {
			t.Errorf("claim %d: %v", i, err)
		}
	}
}

// settle waits until the driver has finished its start: it answers for a claim
// that needs nothing.
func (s *crashScene) settle(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.MustPrepare(t, s.n.AllocateNamed(nil))
}

// wantWithout fails unless nothing of the claims is left and those beside are
// what they were.
func (s *crashScene) wantWithout(t *testing.T, p *harness.Driver) {
	t.Helper()
	s.wantLeft(t, p, s.without)
}

// wantLeft fails unless exactly this is left when a release is over. One that ends
// MPS sessions may go on in the background on a busy machine.
func (s *crashScene) wantLeft(t *testing.T, p *harness.Driver, want harness.Snapshot) {
	t.Helper()
	if s.layout.supervised {
		p.UntilSnapshot(t, s.n, want)
		return
	}
	if diff := want.Diff(s.n.Snapshot(t)); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
}

// untilWithout waits until nothing of the claims is left.
func (s *crashScene) untilWithout(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.Until(t, "the end of the claims", func(context.Context) error {
		return harness.AsError(s.without.Diff(s.n.Snapshot(t)))
	})
}
