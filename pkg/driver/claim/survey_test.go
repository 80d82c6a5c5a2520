// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// findings renders a status, one line for each entry.
func findings(s device.Status) []string {
	var lines []string
	for _, p := range s.Static {
		line := fmt.Sprintf("static %s %d@%d:%d %s", p.PCIAddress, p.ProfileID, p.Placement.Start, p.Placement.Size, p.UUID)
		if p.Gone {
			line += " gone"
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	for _, c := range s.Conditions {
		where := "whole"
		if c.Where != nil {
			where = fmt.Sprintf("%d@%d:%d", ptr.Deref(c.ProfileID, 0), c.Where.Start, c.Where.Size)
		}
		lines = append(lines, fmt.Sprintf("%s %s %s", c.Reason, c.PCIAddress, where))
	}
	return lines
}

func wantFindings(t *testing.T, m *Manager, want ...string) {
	t.Helper()
	expect.Same(t, findings(survey(t.Context(), m)), want)
}

// static is the line of somebody else's partition.
func static(at partition.Address) string {
	return fmt.Sprintf("static %s %d@%d:%d %s", at.PCIAddress, at.ProfileID, at.Placement.Start, at.Placement.Size, migUUID(at.PCIAddress, at.Placement))
}

// kill prepares a claim and kills the plugin at an effect.
func (b *box) kill(t *testing.T, effect, uid string, devices ...string) {
	t.Helper()
	dying := b.manager()
	b.hooks(nil, b.killAt(effect))
	// That the claim is prepared may have been written down before.
	if err := runPrepare(t.Context(), dying, newClaim(uid, devices...)); !b.killed() {
		t.Fatalf("not killed: %v", err)
	}
	b.hooks(nil, nil)
}

var surveyTests = map[string]struct {
	arrange func(t *testing.T, b *box)
	want    []string
	says    []string
}{
	"all is well": {arrange: func(t *testing.T, b *box) {
		mustPrepare(t, b.manager(), newClaim("u1", sliceA0, sliceA4, wholeB, wholeC))
	}},
	"foreign": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressB0)
			b.makeForeign(addressA4)
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), newClaim("u1", sliceA1))
		},
		want: []string{static(addressA0), static(addressA4), static(addressB0)},
	},
	"bare": {
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressA0)
			b.change(addressA0, func(i *gpu.Instance) { i.Compute = nil })
		},
		want: []string{"occupied " + pciA + " 19@0:1"},
		says: []string{"GPU instance 7 (profile 19, placement 0:1)", "no compute instance", "nvidia-smi mig -dgi"},
	},

	"smaller compute instance": { // than its profile, by slices and not by the placement, which is of memory
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressHalfA0)
			b.change(addressHalfA0, func(i *gpu.Instance) { i.Compute[0].Slices = 2 })
		},
		want: []string{"occupied " + pciA + " 9@0:4"},
	},
	"as large as its profile": {
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressHalfA0)
			b.change(addressHalfA0, func(i *gpu.Instance) { i.Compute[0].Slices = 3 })
		},
		want: []string{static(addressHalfA0)},
	},
	"static in use": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), newClaim("u1", staticA0))
		},
		want: []string{static(addressA0)},
	},
	"static in use, a file cannot be read": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			b.makeForeign(addressA4)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", staticA0))
			write(t, m.store.Path("u2"), "{")
		},
		want: []string{static(addressA0), "occupied " + pciA + " 19@4:1", "release-pending " + pciA + " whole", "release-pending " + pciB + " whole", "release-pending " + pciC + " whole"},
		says: []string{"records/u2.boot-1"},
	},
	"static gone": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), newClaim("u1", staticA0))
			b.removeForeign(addressA0)
		},
		want: []string{static(addressA0) + " gone"},
	},
	"static replaced": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), newClaim("u1", staticA0))
			b.removeForeign(addressA0)
			b.makeForeign(addressA0)
		},
		want: []string{static(addressA0)},
	},
	"static of an earlier boot": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), newClaim("u1", staticA0))
			b.boot("boot-2")
		},
		want: []string{static(addressA0)},
	},
	"unreadable in an earlier boot": {
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressA0)
			b.put("data/records/u1.boot-0", "{")
		},
		want: []string{static(addressA0)},
	},
	"abandoned": {
		arrange: func(t *testing.T, b *box) { b.kill(t, "create instance", "u1", sliceA0, sliceA4) },
		want:    []string{"release-pending " + pciA + " 19@0:1"}, // there is nothing at 4 yet
		says:    []string{sliceA0, "default/claim-u1"},
	},
	"abandoned whole": {
		arrange: func(t *testing.T, b *box) { b.kill(t, "interval Short", "u1", turnsA) },
		want:    []string{"release-pending " + pciA + " whole"},
	},
	"abandoned on a GPU that does not answer": {
		arrange: func(t *testing.T, b *box) {
			b.kill(t, "create instance", "u1", sliceA0, sliceA4)
			b.breakDown(pciA, gpu.ErrLost)
		},
		want: []string{"gpu-lost " + pciA + " whole", "release-pending " + pciA + " 19@0:1"},
	},
	"in use": {
		arrange: func(t *testing.T, b *box) {
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0, sliceA4))
			b.occupy(addressA4)
			mustUnprepare(t, m, "u1")
		},
		want: []string{"release-pending " + pciA + " 19@0:1", "release-pending " + pciA + " 19@4:1"},
	},
	"half done in an earlier boot": {
		arrange: func(t *testing.T, b *box) {
			b.kill(t, "create instance", "u1", sliceA0, wholeB)
			b.boot("boot-2")
		},
	},
	"being worked on": {
		arrange: func(t *testing.T, b *box) {
			b.kill(t, "create instance", "u1", sliceA0)
			release, err := b.manager().locks.Claim(t.Context(), "u1")
			expect.Is(t, err, nil)
			t.Cleanup(release)
		},
	},
	"observed": {
		arrange: func(t *testing.T, b *box) {
			b.makeForeign(addressA0)
			mustPrepare(t, b.manager(), admin(newClaim("u1", staticA0, wholeB)))
			b.removeForeign(addressA0)
		},
	},
}

func TestSurvey(t *testing.T) {
	for name, test := range surveyTests {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			test.arrange(t, b)
			m := b.manager()
			before := b.state()
			b.hooks(nil, nil)
			status := survey(t.Context(), m)
			expect.Same(t, findings(status), test.want)
			for _, part := range test.says {
				if !slices.ContainsFunc(status.Conditions, func(c device.Condition) bool { return strings.Contains(c.Message, part) }) {
					t.Errorf("%q is not said in %+v", part, status.Conditions)
				}
			}
			wantFindings(t, m, test.want...)
			if effects := b.seen(); len(effects) > 0 {
				t.Errorf("effects: %v", effects)
			}
			b.wantState(t, "looking on", before)
		})
	}
}

// TestSurveyOfSilence: what was in the way on a GPU is not taken for gone when nothing can be asked.
func TestSurveyOfSilence(t *testing.T) {
	for _, err := range []error{gpu.ErrNotSupported, gpu.ErrDriverNotLoaded} {
		b := newBox(t)
		b.makeForeign(addressA0)
		b.change(addressA0, func(i *gpu.Instance) { i.Compute = nil })
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", sliceA4))
		want := findings(survey(t.Context(), m))
		b.breakDown(pciA, err)
		if diff := cmp.Diff(want, findings(survey(t.Context(), m))); diff != "" || len(want) != 1 {
			t.Errorf("%v: -want +got:\n%s", err, diff)
		}
		b.breakDown(pciA, nil)
		b.removeForeign(addressA0)
		wantFindings(t, m)
	}
}

func TestSurveyOfTrouble(t *testing.T) {
	for err, want := range map[error]device.Reason{
		gpu.ErrLost:            device.Lost,
		gpu.ErrNotFound:        device.Lost,
		gpu.ErrResetRequired:   device.ResetRequired,
		gpu.ErrUnknown:         device.Unresponsive,
		gpu.ErrVersionMismatch: device.Unresponsive,
		errors.New("other"):    device.Unresponsive,
		gpu.ErrNotSupported:    "",
		gpu.ErrDriverNotLoaded: "",
	} {
		b := newBox(t)
		b.makeForeign(addressA0)
		b.makeForeign(addressA4)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", staticA0, sliceB0))
		healthy := findings(survey(t.Context(), m))
		b.breakDown(pciA, err)
		// What was known of the GPU still counts; so does, in another process,
		// what claims have.
		for other, m := range map[bool]*Manager{false: m, true: b.manager()} {
			wantLines := slices.Clone(healthy)
			if other {
				wantLines = wantLines[:1]
			}
			if want != "" {
				wantLines = append(wantLines, fmt.Sprintf("%s %s whole", want, pciA))
			}
			status := survey(t.Context(), m)
			if diff := cmp.Diff(wantLines, findings(status)); diff != "" {
				t.Errorf("%v: -want +got:\n%s", err, diff)
			}
			if want != "" && !strings.Contains(status.Conditions[0].Message, "GPU "+pciA) {
				t.Errorf("%v: message %q", err, status.Conditions[0].Message)
			}
		}
		b.breakDown(pciA, nil)
		wantFindings(t, m, healthy...)
	}
}

// A GPU that a call is at work on is not waited for.
func TestSurveyOfBusyGPU(t *testing.T) {
	b := newBox(t)
	b.makeForeign(addressA0)
	m := b.manager()
	wantFindings(t, m, static(addressA0))
	release := b.lockGPU(b.manager(), pciA)
	b.removeForeign(addressA0)
	b.makeForeign(addressB0)
	wantFindings(t, m, static(addressA0), static(addressB0))
	release()
	wantFindings(t, m, static(addressB0))
}

// A survey that is called off blames no GPU for it, and before there are any GPUs
// there is nothing to say.
func TestSurveyIsCalledOff(t *testing.T) {
	b, m := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.breakDown(pciA, context.Canceled)
	if status := survey(ctx, m); len(findings(status)) > 0 {
		t.Errorf("got %+v", status)
	}
	wantFindings(t, b.bareManager())
}

var (
	addressB0     = partition.Address{PCIAddress: pciB, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
	addressHalfA0 = partition.Address{PCIAddress: pciA, ProfileID: 9, Placement: gpu.Placement{Start: 0, Size: 4}}
)

// TestRefusalIsOver: what was refused because somebody used a GPU is not said of those who have it now.
func TestRefusalIsOver(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1}) // outside of pods
		expect.Is(t, runPrepare(cancelled(t), m, newClaim("u1", sliceA0)), gpu.ErrInUse)
		mustUnprepare(t, m, "u1")
		b.run(pciA)
		mustPrepare(t, m, newClaim("u2", wholeA))
		b.run(pciA, gpu.Process{PID: 5000, InstanceID: -1}) // that of claim u2
		b.pass(time.Hour)
		wantFindings(t, m)
	})
}

// opened says of a GPU that a process has had its node open for too long to count.
type opened struct{ by, pciAddress string }

func (o opened) Users(_ context.Context, pciAddress string, _ []*record.Record, _ *record.Record) (string, map[int]string, string) {
	if pciAddress == o.pciAddress {
		return "", nil, o.by
	}
	return "", nil, ""
}

// TestSurveyOfOpenNode: a GPU whose node a process without a claim has had open for too long is given out all the same, and people are told.
func TestSurveyOfOpenNode(t *testing.T) {
	b := newBox(t)
	m := b.managerWith(func(o *Options) { o.Users = opened{"process 4711 in pod monitoring/agent", pciA} })
	wantFindings(t, m, "opened "+pciA+" whole")
	if c := survey(t.Context(), m).Conditions[0]; c.EffectInForce() != policy.EffectNone || !strings.Contains(c.Message, "pod monitoring/agent") {
		t.Errorf("got %+v", c)
	}
	mustPrepare(t, m, newClaim("u1", wholeA))
	wantFindings(t, m) // it was there before the claim
}

func TestReboot(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("goes", sliceA4))
	b.boot("boot-2")

	m = b.manager()
	// A spec that has survived names device numbers of the earlier boot.
	b.specs["stays"] = []cdi.Device{{Name: "stale"}}
	mustReconcile(t, m)
	if len(b.specs) != 0 || b.count(pciA) != 0 {
		t.Errorf("left or made: %v", b.state())
	}
	// The place of a claim that was not released is taken by another: that one
	// must keep it.
	mustPrepare(t, m, newClaim("new", sliceA4))
	mustUnprepare(t, m, "goes")
	b.wantAt(addressA4, true, "the release of a claim of an earlier boot destroyed another claim's partition")
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	if len(b.specs["stays"]) != 2 || b.count(pciA) != 2 {
		t.Errorf("not made again: %v", b.state())
	}
	b.endAll(m, "stays", "new")
}

func TestReconcileRewritesSpecs(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", sliceA0, wholeC))
	want := b.specs["u1"]
	b.locked(func() { clear(b.specs) })
	_ = b.bareManager().cleanUp(t.Context()) // it knows no GPU
	m := b.manager()
	mustReconcile(t, m)
	expect.Same(t, b.specs["u1"], want)
	b.specs["u1"] = nil
	mustReconcile(t, m)
	expect.Same(t, b.specs["u1"], want)
}

// A claim that a call is at work on is left to it, and does not hold up others.
func TestReconcilePassesOverCalls(t *testing.T) {
	b, m := newNode(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	b.hooks(doAt("create compute instance", func() { close(entered); <-leave }), nil)
	done := goPrepare(t, m, newClaim("u1", sliceA0))
	<-entered
	write(t, host.TemporaryName(m.store.Path("u2")), "{")
	for _, other := range []*Manager{m, b.manager()} {
		mustReconcile(t, other)
	}
	expect.Same(t, b.state()[1:], []string{"instance " + addressA0.String() + " complete=false", "record of u1"})
	close(leave)
	expect.Is(t, <-done, nil)
}

// TestLeftWhileBusy: while a call keeps a GPU for long, what was left there is not said to be cleaned up.
func TestLeftWhileBusy(t *testing.T) {
	for name, other := range map[string]bool{"this process": false, "another process": true} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.hooks(failTimes("destroy instance", always, gpu.ErrInUse), nil)
			mustUnprepare(t, m, "u1")
			wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1")
			holder := m
			if other {
				holder = b.manager()
			}
			release := b.lockGPU(holder, pciA)
			for range 10 {
				if err := m.cleanUp(t.Context()); err == nil {
					t.Error("everything is said to be cleaned up")
				}
				if got := findings(survey(t.Context(), m)); len(got) != 1 {
					t.Errorf("taints %q", got)
				}
				time.Sleep(30 * time.Second)
			}
			release()
			b.hooks(nil, nil)
			time.Sleep(5 * time.Minute)
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o750), os.WriteFile(path, []byte(content), 0o600)))
}

// TestOtherDevicesOfThePlace: what is said of some devices of a GPU says nothing of the others.
func TestOtherDevicesOfThePlace(t *testing.T) {
	all := device.Condition{PCIAddress: pciA, Reason: device.ReleasePending}
	undivided, partitions := all, all
	undivided.Undivided, partitions.Kind = true, device.Partition
	for _, said := range []device.Condition{undivided, partitions} {
		if got := with([]device.Condition{said}, []device.Condition{all, said}); len(got) != 2 || got[1] != all {
			t.Errorf("beside %+v: %+v", said, got)
		}
	}
}

// TestManyOutdatedSpecs: all of them are written again in one round, however many claims observe a GPU.
func TestManyOutdatedSpecs(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		for i := range 120 {
			mustPrepare(t, m, admin(newClaim(fmt.Sprint("u", i), wholeC)))
		}
		for uid := range b.specs {
			b.specs[uid] = nil // the driver was upgraded
		}
		must.Do(t, m.cleanUpGPU(t.Context(), pciC))
		for uid := range b.specs {
			if b.spec(uid) == nil {
				t.Errorf("the spec of %s is not up to date", uid)
			}
		}
	})
}

// TestReconcileBehindMuteSupervisor: a supervisor that does not answer keeps no GPU from being looked after, nor the plugin from getting ready.
func TestReconcileBehindMuteSupervisor(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, portion("share", mpsA, "1Gi", "10"))
		mustPrepare(t, m, newClaim("u2", sliceB0))
		b.hooks(failTimes("destroy instance", 1, errFault), nil)
		mustUnprepare(t, m, "u2")
		if b.count(pciB) != 1 {
			t.Fatal("it did not fail")
		}
		b.silence(true)
		start := time.Now()
		_ = m.cleanUp(t.Context())
		wantWithin(t, start, time.Minute)
		time.Sleep(time.Hour) // what takes longer goes on
		expect.Same(t, b.count(pciB), 0)
	})
}

// An instance that hangs in the kernel cannot be killed and keeps its locks. The one that follows tells of it.
func TestSurveyOfGPUThatNobodyGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, hangs, m := newPair(t)
		release := b.lockGPU(hangs, pciA)
		const elsewhereLimit = 2 * time.Minute
		for _, test := range []struct {
			after time.Duration
			want  []string
		}{
			{0, nil},
			{elsewhereLimit - 10*time.Second, nil},
			{20 * time.Second, []string{"unresponsive " + pciA + " whole"}},
		} {
			time.Sleep(test.after)
			wantFindings(t, m, test.want...)
			if unobserved := m.Unobserved(); len(unobserved) > 0 != (test.want == nil) {
				t.Errorf("after %s: unobserved are %v", test.after, unobserved)
			}
		}
		release()
		wantFindings(t, m)
		// One that this process has is a claim at work, however long.
		defer b.lockGPU(m, pciA)()
		for range 2 {
			wantFindings(t, m)
			time.Sleep(2 * elsewhereLimit)
		}
	})
}

// TestPartitionGoneIsSaid as long as the claim is there.
func TestPartitionGoneIsSaid(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.wantStatements(m)
	b.removeForeign(addressA0)
	said := []string{"u1 PartitionGone", sliceA0, "delete the pods"}
	b.wantStatements(m, said)
	for range 2 {
		wantError(t, m.cleanUp(t.Context()), "was removed by somebody else")
		b.wantStatements(m, said)
	}
	b.makeForeign(addressA0) // the same UUID, and somebody else's
	mustUnprepare(t, m, "u1")
	b.wantStatements(m)
	b.wantAt(addressA0, true, "somebody else has made it in the place of the claim's")
}

// A GPU is reset, or somebody removes a partition, and the next partition gets the ids
// of the one that is gone. The CDI spec of the claim that had that must not come to name
// the other claim's, at no moment.

// loseAndReuse removes the partition of a claim. The next one gets the ids that the first
// of the GPU had.
func (b *box) loseAndReuse() {
	b.removeForeign(addressA0)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.nextID = 7
}

// wantOwnNodes fails if the specs of two claims name the same nodes.
func (b *box) wantOwnNodes(when string, one, other types.UID) {
	b.t.Helper()
	a, c := b.spec(one), b.spec(other)
	if len(a) > 0 && len(c) > 0 && reflect.DeepEqual(a[0].Nodes, c[0].Nodes) {
		b.t.Errorf("%s: the spec of %s names the partition of %s: %v", when, one, other, a[0].Nodes)
	}
}

// Who only observes a partition must not come to observe another claim's.
func TestObserverOutlivesPartition(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, admin(newClaim("watch", sliceA0)))
	mustUnprepare(t, m, "u1")
	b.locked(func() { b.nextID = 7 })
	mustPrepare(t, m, newClaim("u2", sliceA4))
	b.wantOwnNodes("made", "watch", "u2")
	survey(t.Context(), m)
	_ = m.cleanUp(t.Context())
	b.wantOwnNodes("reconciled", "watch", "u2")
	if len(b.spec("watch")) > 0 {
		t.Error("the observer has a spec, and the partition is gone")
	}
	b.endAll(m, "watch", "u2")
}

// A partition of one group is lost, and its ids are used again, while another group of the
// claim is still being made.
func TestPartitionLostWhileOtherGroupsAreMade(t *testing.T) {
	b, m := newNode(t)
	made := make(chan struct{})
	b.hooks(nil, func(effect string) error {
		if effect == "create compute instance" {
			close(made)
			b.hooks(nil, nil)
		}
		return nil
	})
	b.beforeEffect(func(pciAddress, effect string) error {
		if pciAddress != pciB || effect != "create compute instance" {
			return nil
		}
		<-made
		b.loseAndReuse()
		b.beforeEffect(nil)
		mustPrepare(t, b.manager(), newClaim("u2", sliceA4))
		return nil
	})
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0)) // it is made again
	b.wantOwnNodes("prepared", "u1", "u2")
	if len(b.spec("u1")) != 2 || b.count(pciA) != 2 {
		t.Errorf("left: %v", b.state())
	}
	b.endAll(m, "u2", "u1")
}

// The CDI spec of a claim whose partition is gone cannot be removed. It names no partition that is made next.
func TestStaleSpecStays(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.loseAndReuse()
	b.hooks(failTimes("remove spec", always, unix.EIO), nil)
	_ = runPrepare(t.Context(), m, newClaim("u2", sliceA4))
	b.wantOwnNodes("made", "u1", "u2")
}

// onHardware are those of the effects that change a GPU.
func (b *box) onHardware() []string {
	return slices.DeleteFunc(b.seen(), func(e string) bool {
		return !slices.Contains([]string{"mode on", "mode off", "create instance", "create compute instance", "destroy compute instance", "destroy instance",
			"exclusive mode", "default mode", "start session", "stop session", "set limits", "interval Short", "interval Long", "interval Default"}, e)
	})
}

func TestStatic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		b.makeForeign(addressA0)
		before := b.state()
		live, _ := b.look(addressA0)
		m := b.manager()
		b.hooks(nil, nil)
		prepared := mustPrepare(t, m, newClaim("u1", staticA0))
		if len(prepared) != 1 || prepared[0].Device != staticA0 || prepared[0].Admin {
			t.Errorf("got %+v", prepared)
		}
		// The nodes are the GPU and the two capabilities, as for any partition.
		if spec := b.spec("u1"); len(spec) != 1 || len(spec[0].Nodes) != 3 {
			t.Errorf("spec: %+v", spec)
		}
		r, err := m.store.Read("u1")
		must.Do(t, err)
		if d := r.Devices[0]; d.Type != record.Static || d.Partition.Made == nil || *d.Partition.Made != live {
			t.Errorf("record: %+v", d)
		}
		mustPrepare(t, m, newClaim("u1", staticA0))
		mustReconcile(t, m)
		// It is taken like any other device.
		for _, device := range []string{staticA0, halfA0, wholeA} {
			wantError(t, runPrepare(cancelled(t), m, newClaim("u2", device)), device, "default/claim-u1")
		}
		mustUnprepare(t, m, "u1")
		b.wantWithoutEffects()
		b.wantState(t, "at the end", before)
	})
}

func TestAdmin(t *testing.T) {
	b := newBox(t)
	b.makeForeign(addressA4)
	m := b.manager()
	wantError(t, runPrepare(t.Context(), m, admin(newClaim("early", sliceA0))), sliceA0, "admin access does not make one")

	mustPrepare(t, m, newClaim("owner", sliceA0))
	mustPrepare(t, m, newClaim("static", sliceA4+"-static"))
	mustPrepare(t, m, newClaim("whole", wholeB))
	watched := []string{sliceA0, sliceA4 + "-static", wholeA, wholeB, wholeB + "-observer"}
	before := b.state()
	b.hooks(nil, nil)
	prepared := mustPrepare(t, m, admin(newClaim("watch", watched...)))
	for _, d := range prepared {
		if !d.Admin {
			t.Errorf("got %+v", d)
		}
	}
	if diff := cmp.Diff([]string{"write spec", "write prepared"}, slices.DeleteFunc(b.seen(), func(e string) bool { return strings.HasSuffix(e, " preparing") })); diff != "" || len(prepared) != 5 {
		t.Errorf("%d devices, effects: -want +got:\n%s", len(prepared), diff)
	}
	expect.Same(t, b.spec("watch")[1].Nodes, b.spec("owner")[0].Nodes)
	// The observer is in nobody's way.
	mustPrepare(t, m, newClaim("next", wholeA+"-mig-1g10gb-1"))
	mustUnprepare(t, m, "next")
	b.hooks(nil, nil)
	mustPrepare(t, m, admin(newClaim("watch", watched...)))
	mustReconcile(t, m)
	if status := survey(t.Context(), m); len(status.Conditions) > 0 || len(status.Static) != 1 {
		t.Errorf("survey: %+v", status)
	}
	b.deleteClaim("watch")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	b.run(pciB, gpu.Process{PID: 4711, InstanceID: -1}) // the owner's
	mustReconcile(t, m)
	b.wantWithoutEffects()
	b.wantState(t, "released as an orphan", before)

}

// TestAdminOnHungGPU: a claim does not wait for a GPU that it only looks at.
func TestAdminOnHungGPU(t *testing.T) {
	b, m := newNode(t)
	_, comeBack := b.hang(pciB)
	survey(t.Context(), m)
	mustPrepare(t, m, admin(newClaim("watch", wholeB)))
	b.endAll(m, "watch")
	comeBack()
}

// foreignInstances are what somebody else may have made at addressA0.
var foreignInstances = map[string]func(*gpu.Instance){
	"complete": func(*gpu.Instance) {},
	"bare":     func(i *gpu.Instance) { i.Compute = nil },
	"divided":  func(i *gpu.Instance) { i.Compute = append(i.Compute, gpu.ComputeInstance{ID: 1, UUID: "MIG-second"}) },
}

func TestStaticIsNotThere(t *testing.T) {
	for _, change := range []string{"gone", "bare", "divided"} {
		b := newBox(t)
		b.makeForeign(addressA0)
		m := b.manager()
		mustPrepare(t, m, newClaim("had", staticA0, sliceA4))
		left := 1
		if change == "gone" {
			b.removeForeign(addressA0)
			left = 0
		} else {
			b.change(addressA0, foreignInstances[change])
		}
		for _, uid := range []string{"had", "late"} {
			wantError(t, runPrepare(t.Context(), m, newClaim(uid, staticA0, sliceA4)), "device "+staticA0, "is not there any more")
			mustUnprepare(t, m, types.UID(uid))
			if b.count(pciA) != left {
				t.Errorf("%s: left are %v", change, b.state())
			}
		}
	}
}

func TestForeignPartition(t *testing.T) {
	for _, change := range foreignInstances {
		b, m := newNode(t)
		b.makeForeign(addressA0)
		b.change(addressA0, change)
		before := b.state()
		for _, device := range []string{sliceA0, mpsSliceA0, turnSliceA0} {
			wantError(t, runPrepare(t.Context(), m, newClaim("u1", device)), "device "+device, "was not made by this driver")
		}
		wantError(t, runPrepare(t.Context(), m, newClaim("u1", wholeA)), "device "+wholeA)
		b.wantState(t, "refused", before)
		// It is in nobody's way elsewhere, and does not go with ours.
		mustPrepare(t, m, newClaim("u2", sliceA4))
		mustReconcile(t, m)
		mustUnprepare(t, m, "u2")
		b.wantState(t, "at the end", before)
	}
}

// TestStaticPartitionInUse: a partition that nobody destroys is given out again when it is idle, like a whole GPU.
func TestStaticPartitionInUse(t *testing.T) {
	for _, device := range []string{wholeC, staticA0} {
		runInBubble(t, device, func(t *testing.T) {
			b := newBox(t)
			b.makeForeign(addressA0)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", device))
			b.put("proc/4711/cgroup", "0::/kubepods/burstable/pod3f2a1b4c-0000-4000-8000-000000000001/"+strings.Repeat("0123456789abcdef", 4)+"\n")
			live, _ := b.look(addressA0)
			b.run(pciA, gpu.Process{PID: 4711, InstanceID: live.InstanceID})
			b.run(pciC, gpu.Process{PID: 4711, InstanceID: -1})
			mustUnprepare(t, m, "u1")
			wantError(t, runPrepare(t.Context(), m, newClaim("u2", device)), gpu.ErrInUse.Error())
		})
	}
}
