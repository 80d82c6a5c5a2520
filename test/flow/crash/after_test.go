// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// crashContinuation is what happens after a crash, with another process, until
// nothing of the claims is left.
type crashContinuation struct {
	name string
	run  func(t *testing.T, s *crashNode)
}

var crashContinuations = []crashContinuation{
	// The kubelet calls again, or another pod has the same claim.
	{"prepare", func(t *testing.T, s *crashNode) {
		p := s.start(t, harness.Quiet)
		s.prepareAll(t, p)
		p.MustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	// The pod was deleted.
	{"unprepare", func(t *testing.T, s *crashNode) {
		p := s.start(t, harness.Quiet)
		s.settle(t, p)
		p.MustUnprepare(t, s.claims...)
		s.wantWithout(t, p)
	}},
	{"unprepare at once", func(t *testing.T, s *crashNode) {
		p := s.start(t, harness.Quiet)
		p.MustUnprepare(t, s.claims...)
		// The driver may not know the GPUs yet when it is asked.
		s.untilWithout(t, p)
	}},
	// The claim was deleted and nobody calls.
	{"deleted", func(t *testing.T, s *crashNode) {
		for _, c := range s.claims {
			s.n.API.DeleteClaim(c.GetNamespace(), c.GetName())
		}
		s.untilWithout(t, s.start(t, harness.Eager))
	}},
	// The node went down as well. The kubelet prepares all claims again.
	{"reboot", func(t *testing.T, s *crashNode) {
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
func (s *crashNode) reboot(t *testing.T) {
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
func (s *crashNode) prepareAll(t *testing.T, p *harness.Driver) {
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
			expect.Do(t, s.n.CheckDevice(s.claims[i].GetUid(), ids[j], d, &m.GPUs[d.GPU]), "claim", i, "device", d)
		}
		expect.Do(t, s.checkSharing(t, i, ids), "claim", i)
	}
}

// settle waits until the driver has finished its start: it answers for a claim
// that needs nothing.
func (s *crashNode) settle(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.MustPrepare(t, s.n.AllocateNamed(nil))
}

// wantWithout fails unless nothing of the claims is left and those beside are
// what they were.
func (s *crashNode) wantWithout(t *testing.T, p *harness.Driver) {
	t.Helper()
	s.wantLeft(t, p, s.without)
}

// wantLeft fails unless exactly this is left when a release is over. One that ends
// MPS sessions may go on in the background on a busy machine.
func (s *crashNode) wantLeft(t *testing.T, p *harness.Driver, want harness.Snapshot) {
	t.Helper()
	if s.layout.supervised {
		p.UntilSnapshot(t, s.n, want)
		return
	}
	expect.Equal(t, want.Diff(s.n.Snapshot(t)), "", "what is left")
}

// untilWithout waits until nothing of the claims is left.
func (s *crashNode) untilWithout(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.Until(t, "the end of the claims", func(context.Context) error {
		return harness.AsError(s.without.Diff(s.n.Snapshot(t)))
	})
}

func TestMain(m *testing.M) { harness.Main(m) }

// TestCrashTwice kills the driver when it has changed the hardware for the last
// time, and then its successor before every effect of its start, which cleans up.
func TestCrashTwice(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "crashes", 60)
	for _, operation := range crashOperations {
		t.Run(operation.name, func(t *testing.T) {
			t.Parallel()
			s := newCrashNode(t, crashLayouts["partition turns MIG mode on"])
			s.operation = operation
			s.killTwice(t, count)
		})
	}
}

func (s *crashNode) killTwice(t *testing.T, count *harness.Enumeration) {
	changes := 0
	for _, e := range s.effects(t) {
		if s.changesGPUs(e) {
			changes++
		}
	}
	// Only these count: what the driver writes beside, at any time, would make it another effect.
	crash := func(t *testing.T) {
		if _, killed := s.crashFor(t, changes, s.changesGPUs); !killed {
			t.Fatalf("the hardware is not changed %d times", changes)
		}
	}
	crash(t)
	effects, _ := s.crashAtStart(t, 0)
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		if !count.Find(n) {
			continue
		}
		passed := t.Run("before "+strconv.Itoa(n), func(t *testing.T) {
			crash(t)
			done, killed := s.crashAtStart(t, n)
			if killed {
				more = true
				t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
			}
			s.untilWithout(t, s.start(t, harness.Quiet))
			count.Ran(s.operation.name + ", then start")
		})
		if !passed {
			return
		}
	}
}

// changesGPUs reports whether an effect is the end of a change of the hardware. The driver's own locks
// are bytes of a file as well.
func (s *crashNode) changesGPUs(e killpoint.Effect) bool {
	return strings.HasPrefix(e.Call, "fcntl") && slices.Contains(e.Targets, sysroot.StatePath(s.n.Root))
}

// crashAtStart starts a driver and kills it before effect n, or when its start is
// over.
func (s *crashNode) crashAtStart(t *testing.T, n int) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	d := s.n.MustSpawn(t, s.flags(harness.Quiet)...)
	d.Arm(n)
	err := d.Connect(t.Context(), s.n.RegistrarDir)
	if err == nil {
		_, err = d.TryPrepare(t.Context(), s.n.AllocateNamed(nil), harness.KubeletTimeout)
	}
	effects, killed = d.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	d.Close()
	return effects, killed
}
