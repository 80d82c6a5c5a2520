// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// onHardware are those of the effects that change a GPU.
func (b *box) onHardware() []string {
	return slices.DeleteFunc(b.seen(), func(e string) bool {
		return !slices.Contains([]string{"mode on", "mode off", "create instance", "create compute instance", "destroy compute instance", "destroy instance",
			"exclusive mode", "default mode", "start session", "stop session", "set limits", "interval Short", "interval Long", "interval Default"}, e)
	})
}

func TestStatic(t *testing.T) {
	synctest.Test(t, testStatic)
}

func testStatic(t *testing.T) {
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
	if err != nil {
		t.Fatal(err)
	}
	if d := r.Devices[0]; d.Type != record.Static || d.Partition.Made == nil || *d.Partition.Made != live {
		t.Errorf("record: %+v", d)
	}
	mustPrepare(t, m, newClaim("u1", staticA0))
	mustReconcile(t, m)
	// It is taken like any other device.
	for _, device := range []string{staticA0, halfA0, wholeA} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := m.Prepare(ctx, newClaim("u2", device))
		cancel()
		wantError(t, err, device, "default/claim-u1")
	}
	mustUnprepare(t, m, "u1")
	if got := b.onHardware(); len(got) > 0 {
		t.Errorf("effects: %v", got)
	}
	b.wantState(t, "at the end", before)
}

func TestStaticIsNotThere(t *testing.T) {
	for name, test := range map[string]struct {
		change func(b *box)
		want   string
	}{
		"gone": {func(b *box) { b.removeForeign(addressA0) }, "is not there any more"},
		"bare": {func(b *box) { b.change(addressA0, func(i *gpu.Instance) { i.Compute = nil }) }, "is not there any more"},
		"divided": {func(b *box) {
			b.change(addressA0, func(i *gpu.Instance) {
				i.Compute = append(i.Compute, gpu.ComputeInstance{ID: 1, UUID: "MIG-second"})
			})
		}, "is not there any more"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.makeForeign(addressA0)
			m := b.manager()
			mustPrepare(t, m, newClaim("had", staticA0, sliceA4))
			test.change(b)
			b.hooks(nil, nil)
			_, err := m.Prepare(t.Context(), newClaim("had", staticA0, sliceA4))
			wantError(t, err, "device "+staticA0, test.want)
			before := b.hardware()
			mustUnprepare(t, m, "had")
			_, err = m.Prepare(t.Context(), newClaim("late", staticA0))
			wantError(t, err, "device "+staticA0, test.want)
			if b.count(pciA) != len(before)-2 { // MIG mode is a line as well
				t.Errorf("before %v, now %v", before, b.hardware())
			}
		})
	}
}

func TestForeignPartition(t *testing.T) {
	for name, change := range map[string]func(*gpu.Instance){
		"complete": func(*gpu.Instance) {},
		"bare":     func(i *gpu.Instance) { i.Compute = nil },
		"divided": func(i *gpu.Instance) {
			i.Compute = append(i.Compute, gpu.ComputeInstance{ID: 1, UUID: "MIG-second"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			b.makeForeign(addressA0)
			b.change(addressA0, change)
			before := b.state()
			_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
			wantError(t, err, "device "+sliceA0, "was not made by this driver")
			_, err = m.Prepare(t.Context(), newClaim("u1", wholeA))
			wantError(t, err, "device "+wholeA)
			mustUnprepare(t, m, "u1")
			// It is in nobody's way elsewhere, and does not go with ours.
			mustPrepare(t, m, newClaim("u2", sliceA4))
			mustReconcile(t, m)
			mustUnprepare(t, m, "u2")
			b.wantState(t, "at the end", before)
		})
	}
}

func TestAdmin(t *testing.T) {
	b := newBox(t)
	b.makeForeign(addressA4)
	m := b.manager()
	_, err := m.Prepare(t.Context(), admin(newClaim("early", sliceA0)))
	wantError(t, err, sliceA0, "admin access does not make one")

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
	if diff := cmp.Diff(b.spec("owner")[0].Nodes, b.spec("watch")[1].Nodes); diff != "" {
		t.Errorf("the observer sees other nodes: %s", diff)
	}
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
	if got := b.onHardware(); len(got) > 0 {
		t.Errorf("effects: %v", got)
	}
	b.wantState(t, "released as an orphan", before)

}

// TestAdminOnHungGPU: a claim does not wait for a GPU that it only looks at.
func TestAdminOnHungGPU(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	_, comeBack := b.hang(pciB)
	survey(t.Context(), m)
	mustPrepare(t, m, admin(newClaim("watch", wholeB)))
	mustUnprepare(t, m, "watch")
	b.wantNothing()
	comeBack()
}

// What another driver was allocated in the same claim is none of ours, however
// much it looks like it.
func TestOtherDriversResults(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("owner", sliceA4))
	claim := newClaim("u1", sliceA4, sliceA0)
	claim.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
	if prepared := mustPrepare(t, m, claim); len(prepared) != 1 || prepared[0].Device != sliceA0 {
		t.Errorf("got %+v", prepared)
	}
	mustUnprepare(t, m, "u1")
	if _, found := b.look(addressA4); !found || b.count(pciA) != 1 {
		t.Errorf("left: %v", b.state())
	}
}

// TestStaticPartitionInUse: a partition that nobody destroys is given out again when it is idle, like a whole GPU.
func TestStaticPartitionInUse(t *testing.T) {
	for name, test := range map[string]struct{ device string }{"whole": {wholeC}, "static": {staticA0}} {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			b.makeForeign(addressA0)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", test.device))
			cgroup := "0::/kubepods/burstable/pod3f2a1b4c-0000-4000-8000-000000000001/" + strings.Repeat("0123456789abcdef", 4)
			b.put("proc/4711/cgroup", cgroup+"\n")
			b.put("proc/4711/comm", "train\n")
			instance, pci := -1, pciC
			if name == "static" {
				live, _ := b.look(addressA0)
				instance, pci = live.InstanceID, pciA
			}
			b.run(pci, gpu.Process{PID: 4711, InstanceID: instance})
			mustUnprepare(t, m, "u1")
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := m.Prepare(ctx, newClaim("u2", test.device))
			if err == nil {
				t.Errorf("device %s was given to u2 while a process of the pod of u1 is on it", test.device)
			} else {
				t.Logf("refused: %v", err)
			}
			if name == "static" {
				t.Logf("survey: %+v", survey(t.Context(), m).Conditions)
			}
		})
	}
}
