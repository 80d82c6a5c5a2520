// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/sysroot"
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
		p := s.start(t, quiet)
		s.prepareAll(t, p)
		p.mustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	// The pod was deleted.
	{"unprepare", func(t *testing.T, s *crashScene) {
		p := s.start(t, quiet)
		s.settle(t, p)
		p.mustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	{"unprepare at once", func(t *testing.T, s *crashScene) {
		p := s.start(t, quiet)
		p.mustUnprepare(t, s.claims...)
		// The driver may not know the GPUs yet when it is asked.
		s.untilWithout(t, p)
	}},
	// The claim was deleted and nobody calls.
	{"deleted", func(t *testing.T, s *crashScene) {
		for _, c := range s.claims {
			s.n.api.DeleteClaim(c.GetNamespace(), c.GetName())
		}
		s.untilWithout(t, s.start(t, eager))
	}},
	// The node went down as well. The kubelet prepares all claims again.
	{"reboot", func(t *testing.T, s *crashScene) {
		s.reboot(t)
		p := s.start(t, quiet)
		s.prepareBeside(t, p)
		s.prepareAll(t, p)
		p.mustUnprepare(t, slices.Concat(s.claims, s.beside)...)
		s.wantLeft(t, p, s.pristine)
		s.prepareBeside(t, p)
	}},
}

// reboot is what happens to the machine while no driver runs.
func (s *crashScene) reboot(t *testing.T) {
	t.Helper()
	s.goDown(t)
	if err := sysroot.Reboot(s.n.root, sysroot.RebootOptions{Renumber: true}); err != nil {
		t.Fatal(err)
	}
	// The folder of CDI specs is not on a disk.
	for _, name := range s.n.cdiSpecs(t) {
		if err := os.Remove(filepath.Join(s.n.cdi, name)); err != nil {
			t.Fatal(err)
		}
	}
	if s.layout.supervised {
		s.supervisor = s.n.startSupervisor(s.t)
	}
}

// goDown ends all of MPS.
func (s *crashScene) goDown(t *testing.T) {
	t.Helper()
	if s.supervisor != nil {
		s.supervisor.kill()
	}
	if err := s.n.clearMPS(); err != nil {
		t.Fatal(err)
	}
}

// prepareAll prepares the claims in one call and checks what containers get.
func (s *crashScene) prepareAll(t *testing.T, p *process) {
	t.Helper()
	answers := p.prepare(t, s.claims...)
	m := s.n.machine(t)
	for i, answer := range answers {
		if answer.GetError() != "" {
			t.Fatalf("prepare claim %d: %s", i, answer.GetError())
		}
		devices := slices.Clone(answer.GetDevices())
		slices.SortFunc(devices, func(a, b *drapb.Device) int { return strings.Compare(a.RequestNames[0], b.RequestNames[0]) })
		var ids []string
		for j, d := range devices {
			r := s.layout.claims[i][j]
			ids = append(ids, d.GetCdiDeviceIds()...)
			if err := s.n.checkDevice(s.claims[i].GetUid(), d.GetCdiDeviceIds()[0], r, &m.GPUs[r.gpu]); err != nil {
				t.Errorf("claim %d, device %v: %v", i, r, err)
			}
		}
		if err := s.checkSharing(t, i, ids); err != nil {
			t.Errorf("claim %d: %v", i, err)
		}
	}
}

// settle waits until the driver has finished its start: it answers for a claim
// that needs nothing.
func (s *crashScene) settle(t *testing.T, p *process) {
	t.Helper()
	p.mustPrepare(t, s.n.allocate(nil))
}

// wantWithout fails unless nothing of the claims is left and those beside are
// what they were.
func (s *crashScene) wantWithout(t *testing.T, p *process) {
	t.Helper()
	s.wantLeft(t, p, s.without)
}

// wantLeft fails unless exactly this is left when a release is over. One that ends
// MPS sessions may go on in the background on a busy machine.
func (s *crashScene) wantLeft(t *testing.T, p *process, want traces) {
	t.Helper()
	if s.layout.supervised {
		p.untilLeft(t, s.n, want)
		return
	}
	if diff := want.diff(s.n.traces(t)); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
}

// untilWithout waits until nothing of the claims is left.
func (s *crashScene) untilWithout(t *testing.T, p *process) {
	t.Helper()
	p.until(t, "the end of the claims", func(context.Context) error {
		return asError(s.without.diff(s.n.traces(t)))
	})
}
