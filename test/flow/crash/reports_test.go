// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/must"
)

// reportNode is a crashNode whose driver reports devices in the status of claims and in files for
// containers.
type reportNode struct{ *crashNode }

// TestCrashReports kills the driver before every effect that the files about devices have while a partition
// and a share are prepared or unprepared, and after the last, and goes on with another process, which brings
// files and status up to date. All other effects are those of TestCrash.
func TestCrashReports(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "crashes", 25)
	s := &reportNode{newCrashNode(t, crashLayout{
		machine: "h100x2", supervised: true, reported: true, beside: [][]harness.Device{{harness.Partition(0, "3g.40gb", 4)}},
		claims: [][]harness.Device{{harness.Partition(0, "1g.10gb", 0)}, {{GPU: 1, Kind: harness.MPS, Memory: 10 << 30, Percent: 25}}},
	})}
	for _, operation := range crashOperations {
		passed := t.Run(operation.name, func(t *testing.T) {
			s.operation = operation
			s.killEverywhere(t, count)
		})
		if !passed {
			return // what is left disturbs the other operation
		}
	}
	s.checkBeside(t)
}

// reportContinuations are what happens after a crash. Their drivers end with them: the status is
// written by the newest driver of a node.
var reportContinuations = []struct {
	name string
	run  func(t *testing.T, s *reportNode)
}{
	{"prepare", func(t *testing.T, s *reportNode) {
		p := s.start(t, harness.Frequent)
		defer p.Kill()
		s.prepareAll(t, p)
		s.untilReported(t, p)
		p.MustUnprepare(t, s.claims...)
		s.untilNothing(t, p)
	}},
	{"unprepare", func(t *testing.T, s *reportNode) {
		p := s.start(t, harness.Frequent)
		defer p.Kill()
		p.MustUnprepare(t, s.claims...)
		s.untilNothing(t, p)
	}},
	{"deleted", func(t *testing.T, s *reportNode) {
		for _, c := range s.claims {
			s.n.API.DeleteClaim(c.GetNamespace(), c.GetName())
		}
		p := s.start(t, harness.Eager)
		defer p.Kill()
		p.MustUnprepare(t, s.claims...) // the files stay until then
		s.untilNothing(t, p)
	}},
}

// killEverywhere kills before effect 1, 2 and so on until there is no such effect.
func (s *reportNode) killEverywhere(t *testing.T, count *harness.Enumeration) {
	effects, _ := s.crash(t, 0)
	reportContinuations[0].run(t, s)
	for i, e := range effects {
		t.Logf("effect %d: %s", i+1, s.shorten(e))
	}
	for n, more := 1, true; more; n++ {
		more = n <= len(effects)
		if !count.Find(n) {
			continue
		}
		continuation := reportContinuations[harness.TheSample().Way(n, len(reportContinuations))]
		passed := t.Run("before "+strconv.Itoa(n)+"/"+continuation.name, func(t *testing.T) {
			done, killed := s.crash(t, n)
			if killed {
				// There may be more than there were the first time.
				more = true
				t.Logf("killed before effect %d: %s", n, s.shorten(done[n-1]))
			}
			continuation.run(t, s)
			count.Ran(s.operation.name + ", then " + continuation.name)
		})
		if !passed {
			return // what is left disturbs all others
		}
	}
}

// crash is that of the node for the effects of reports about these claims.
func (s *reportNode) crash(t *testing.T, n int) (effects []killpoint.Effect, killed bool) {
	t.Helper()
	p := s.n.StartKillable(t, s.flags(harness.Quiet)...)
	s.allocate(t)
	s.settle(t, p.Driver)
	done := s.reported
	if s.operation.prepared {
		for _, c := range s.claims {
			p.MustPrepare(t, c)
		}
		s.untilReported(t, p.Driver)
		done = func(*testing.T) error { return nil }
	}
	p.ArmFor(n, s.isReport)
	err := s.operation.call(t.Context(), p.Driver, s.claims)
	if err == nil {
		err = harness.Eventually(t.Context(), func() error {
			select {
			case <-p.Exited:
				return nil
			default:
				return done(t)
			}
		})
	}
	effects, killed = p.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	p.Kill()
	return effects, killed
}

// isReport reports whether an effect belongs to the files about the devices of the claims.
func (s *reportNode) isReport(e killpoint.Effect) bool {
	return slices.ContainsFunc(e.Targets, func(path string) bool {
		report := strings.Contains(path, "/dra-device-metadata") || strings.Contains(path, "_metadata_")
		return report && slices.ContainsFunc(s.claims, func(c *drapb.Claim) bool {
			return strings.Contains(path, c.GetUid()) || strings.Contains(path, c.GetName())
		})
	})
}

// untilReported waits until the status of the claims is right and checks the files.
func (s *reportNode) untilReported(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.Until(t, "the status of the claims", func(context.Context) error { return s.reported(t) })
	for i, c := range s.claims {
		ids := p.MustPrepare(t, c)
		read, err := harness.ReadMetadata(s.n.Container(t, ids...), c.GetName(), "r0")
		must.Do(t, err, "claim", i)
		if len(read.Requests) != 1 || len(read.Requests[0].Devices) != 1 {
			t.Fatalf("claim %d: the file says %+v", i, read)
		}
		uuid := read.Requests[0].Devices[0].Attributes["uuid"].StringValue
		if want := s.uuid(t, i); uuid == nil || *uuid != want {
			t.Errorf("claim %d: the file says %+v, want the UUID %s", i, read, want)
		}
	}
}

// uuid is that of the device of a claim.
func (s *reportNode) uuid(t *testing.T, claim int) string {
	t.Helper()
	d := s.layout.claims[claim][0]
	g := &s.n.Machine(t).GPUs[d.GPU]
	if d.Profile == "" {
		return g.UUID
	}
	instance := (harness.Place{Profile: d.Profile, Start: d.Start}).Find(g)
	if instance == nil || len(instance.Compute) != 1 {
		t.Fatalf("claim %d has the instance %+v", claim, instance)
	}
	return instance.Compute[0].UUID
}

// reported fails unless the status of each claim says which device it has.
func (s *reportNode) reported(t *testing.T) error {
	t.Helper()
	for i, c := range s.claims {
		entries, err := s.n.Status(c.GetNamespace(), c.GetName())
		if err != nil {
			return err
		}
		if len(entries) != 1 || entries[0].Ready != "True/Ready" || entries[0].UUID != s.uuid(t, i) {
			return fmt.Errorf("claim %d has the status %+v", i, entries)
		}
	}
	return nil
}

// untilNothing waits until nothing of the claims is left on the node.
func (s *reportNode) untilNothing(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.Until(t, "the end of the claims", func(context.Context) error {
		return harness.AsError(s.without.Diff(s.n.Snapshot(t)))
	})
}

// checkBeside checks that the claim beside has its status after all that.
func (s *reportNode) checkBeside(t *testing.T) {
	t.Helper()
	p := s.start(t, harness.Frequent)
	entries, err := s.n.Status(s.beside[0].GetNamespace(), s.beside[0].GetName())
	if err != nil || len(entries) != 1 || entries[0].Ready != "True/Ready" {
		t.Errorf("the claim beside has the status %+v, %v", entries, err)
	}
	p.MustUnprepare(t, s.beside...)
	p.UntilSnapshot(t, s.n, s.pristine)
}
