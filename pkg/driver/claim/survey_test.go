// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
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

// static is the line of somebody else's partition.
func static(at partition.Address) string {
	return fmt.Sprintf("static %s %d@%d:%d %s", at.PCIAddress, at.ProfileID, at.Placement.Start, at.Placement.Size, migUUID(at.PCIAddress, at.Placement))
}

// kill prepares a claim and kills the plugin at an effect.
func (b *box) kill(t *testing.T, effect, uid string, devices ...string) {
	t.Helper()
	dying := b.manager()
	b.hooks(nil, b.killAt(effect))
	if _, err := dying.Prepare(t.Context(), newClaim(uid, devices...)); !errors.Is(err, errKilled) {
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
	"divided": {
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressA0)
			b.change(addressA0, func(i *gpu.Instance) { i.Compute = append(i.Compute, gpu.ComputeInstance{ID: 1, UUID: "MIG-x"}) })
		},
		want: []string{"occupied " + pciA + " 19@0:1"},
		says: []string{"2 compute instances"},
	},
	"without UUID": {
		arrange: func(_ *testing.T, b *box) {
			b.makeForeign(addressA0)
			b.change(addressA0, func(i *gpu.Instance) { i.Compute[0].UUID = "" })
		},
		want: []string{"occupied " + pciA + " 19@0:1"},
		says: []string{"UUID"},
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
			live, _ := b.look(addressA4)
			b.run(pciA, gpu.Process{PID: 1, InstanceID: live.InstanceID})
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
			if err != nil {
				t.Fatal(err)
			}
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
			if diff := cmp.Diff(test.want, findings(status)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			for _, part := range test.says {
				if !slices.ContainsFunc(status.Conditions, func(c device.Condition) bool { return strings.Contains(c.Message, part) }) {
					t.Errorf("%q is not said in %+v", part, status.Conditions)
				}
			}
			if diff := cmp.Diff(findings(status), findings(survey(t.Context(), m))); diff != "" {
				t.Errorf("the second time, -before +now:\n%s", diff)
			}
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
		if got := findings(survey(t.Context(), m)); len(got) > 0 {
			t.Errorf("%v: when it answers again: %q", err, got)
		}
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
		if diff := cmp.Diff(healthy, findings(survey(t.Context(), m))); diff != "" {
			t.Errorf("%v, when it is over: -want +got:\n%s", err, diff)
		}
	}
}

// A GPU that a call is at work on is not waited for.
func TestSurveyOfBusyGPU(t *testing.T) {
	b := newBox(t)
	b.makeForeign(addressA0)
	m := b.manager()
	before := findings(survey(t.Context(), m))
	release, err := b.manager().locks.GPUs(t.Context(), []string{pciA})
	if err != nil {
		t.Fatal(err)
	}
	b.removeForeign(addressA0)
	b.makeForeign(addressB0)
	want := append(before, static(addressB0))
	if diff := cmp.Diff(want, findings(survey(t.Context(), m))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	release()
	if diff := cmp.Diff(want[1:], findings(survey(t.Context(), m))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A survey that is called off blames no GPU for it, and before there are any GPUs
// there is nothing to say.
func TestSurveyIsCalledOff(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b.breakDown(pciA, context.Canceled)
	if status := survey(ctx, m); len(findings(status)) > 0 {
		t.Errorf("got %+v", status)
	}
	if status := survey(t.Context(), b.bareManager()); len(findings(status)) > 0 {
		t.Errorf("without inventory: got %+v", status)
	}
}

var addressB0 = partition.Address{PCIAddress: pciB, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}

// TestRefusalIsOver: what was refused because somebody used a GPU is not said of those who have it now.
func TestRefusalIsOver(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1}) // outside of pods
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	_, err := m.Prepare(ctx, newClaim("u1", sliceA0))
	cancel()
	if err == nil {
		t.Fatal("it was not refused")
	}
	mustUnprepare(t, m, "u1")
	b.run(pciA)
	mustPrepare(t, m, newClaim("u2", wholeA))
	b.run(pciA, gpu.Process{PID: 5000, InstanceID: -1}) // that of claim u2
	b.pass(time.Hour)
	for _, c := range survey(t.Context(), m).Conditions {
		t.Errorf("process 4711 has ended an hour ago: %s %s: %s", c.Reason, c.Kind, c.Message)
	}
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
	o := b.options()
	o.Users = opened{"process 4711 in pod monitoring/agent", pciA}
	m, err := NewManager(o)
	if err != nil {
		t.Fatal(err)
	}
	m.SetInventory(testInventory(t))
	said := survey(t.Context(), m).Conditions
	if diff := cmp.Diff([]string{"opened " + pciA + " whole"}, findings(device.Status{Conditions: said})); diff != "" {
		t.Fatalf("-want +got:\n%s", diff)
	}
	if c := said[0]; c.EffectInForce() != policy.EffectNone || !strings.Contains(c.Message, "pod monitoring/agent") {
		t.Errorf("got %+v", c)
	}
	mustPrepare(t, m, newClaim("u1", wholeA))
	for _, c := range survey(t.Context(), m).Conditions {
		t.Errorf("it was there before the claim: %+v", c)
	}
}
