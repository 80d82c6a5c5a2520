// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// smi runs nvidia-smi of the machine, as an administrator does.
func (n *node) smi(t testing.TB, args string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), filepath.Join(n.root, "usr/bin/nvidia-smi"), strings.Fields(args)...).CombinedOutput()
	if err != nil {
		t.Fatalf("nvidia-smi %s: %v\n%s", args, err, out)
	}
}

// wantInstances fails unless these are all live instances of a GPU.
func (n *node) wantInstances(t testing.TB, gpu int, want ...place) {
	t.Helper()
	g := n.machine(t).GPUs[gpu]
	if diff := cmp.Diff(want, places(&g), cmp.AllowUnexported(place{})); diff != "" {
		t.Errorf("instances of GPU %d (-want +got):\n%s", gpu, diff)
	}
}

// static waits until the partition of somebody else is published under a name of
// its own, with its UUID, and returns the name.
func (n *node) static(t testing.TB, p *process, gpu int, at place) string {
	t.Helper()
	g := n.machine(t).GPUs[gpu]
	in := at.find(&g)
	if in == nil || len(in.Compute) != 1 {
		t.Fatalf("GPU %d has no partition %v: %+v", gpu, at, g.MIG.Instances)
	}
	name := deviceName(g.PCIAddress, at) + "-static"
	p.until(t, "device "+name, func(context.Context) error {
		d, found := n.published()[name]
		if uuid := d.Attributes["uuid"].StringValue; !found || uuid == nil || *uuid != in.Compute[0].UUID {
			return errors.New("it is not published with its UUID")
		}
		return nil
	})
	return name
}

// divided is a driver on a machine where somebody made a partition 2g.20gb at 2
// on GPU 0.
func divided(t *testing.T) (*node, *process, place) {
	t.Helper()
	n := newNode(t, "h100x2")
	p := n.start(t, frequent...)
	p.ready(t)
	p.untilTainted(t, n, "occupied", nil)
	n.smi(t, "-i 0 -mig 1")
	n.smi(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	return n, p, place{"2g.20gb", 2}
}

// TestForeignPartition: a partition that somebody made is offered as it is while
// the driver runs, what overlaps with it is not, and all of that ends with it.
func TestForeignPartition(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	name := n.static(t, p, 0, at)
	p.untilTainted(t, n, "occupied", n.overlapping(t, 0, 2, 2))

	claim := n.allocate([]string{name})
	ids := p.mustPrepare(t, claim)
	if diff := cmp.Diff(ids, p.mustPrepare(t, claim)); diff != "" {
		t.Errorf("the second prepare gives other CDI ids (-first +second):\n%s", diff)
	}
	g := n.machine(t).GPUs[0]
	want, err := n.wantNodes(&g, at.find(&g))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.specNodes(claim.GetUid(), ids[0])
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("device nodes of the static device: %v (-want +got):\n%s", err, diff)
	}
	beside := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	p.mustPrepare(t, beside)

	p.kill()
	p = n.start(t, frequent...)
	p.ready(t)
	n.wantInstances(t, 0, at, place{"1g.10gb", 4})
	p.untilTainted(t, n, "occupied", n.overlapping(t, 0, 2, 2))
	p.mustUnprepare(t, claim, beside)
	n.wantInstances(t, 0, at)
	if !n.migMode(t)[0] {
		t.Error("MIG mode was turned off although a partition is there")
	}
	if left := append(n.journal(t), n.cdiSpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}

	n.smi(t, "mig -i 0 -dci")
	n.smi(t, "mig -i 0 -dgi")
	p.untilTainted(t, n, "occupied", nil)
	p.until(t, "the static device to go", func(context.Context) error {
		if _, found := n.published()[name]; found {
			return errors.New("it is still published")
		}
		return nil
	})
	whole := n.allocate(n.names(t, []request{{gpu: 0}}))
	p.mustPrepare(t, whole)
	p.mustUnprepare(t, whole)
	n.wantClean(t)
}

// TestForeignPartitionInTheWay: claims for what overlaps with it are refused, at
// the same place too, and never change it.
func TestForeignPartitionInTheWay(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	for _, device := range []request{mig(0, "2g.20gb", 2), mig(0, "1g.10gb", 3), mig(0, "7g.80gb", 0), {gpu: 0}} {
		claim := n.allocate(n.names(t, []request{device}))
		if got := p.prepare(t, claim)[0].GetError(); got == "" {
			t.Errorf("%+v was prepared although somebody's partition is there", device)
		}
		n.wantInstances(t, 0, at)
		p.mustUnprepare(t, claim)
		n.wantInstances(t, 0, at)
	}
	if !n.migMode(t)[0] {
		t.Error("MIG mode was turned off although a partition is there")
	}
	if left := append(n.journal(t), n.cdiSpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestForeignPartitionGoesWhileClaimed: the device stays published, tainted, as
// long as a claim has it, and the claim can end.
func TestForeignPartitionGoesWhileClaimed(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	name := n.static(t, p, 0, at)
	claim := n.allocate([]string{name})
	p.mustPrepare(t, claim)
	n.smi(t, "mig -i 0 -dci")
	n.smi(t, "mig -i 0 -dgi")
	p.untilTainted(t, n, "gone", []string{name})
	p.untilTainted(t, n, "occupied", nil)

	// Another one in the same place is not the one that the claim has.
	n.smi(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	if got := p.prepare(t, claim)[0].GetError(); got == "" {
		t.Error("the claim was prepared with a partition that it was not allocated")
	}
	p.mustUnprepare(t, claim)
	n.wantInstances(t, 0, at)
	n.static(t, p, 0, at)
	p.untilTainted(t, n, "gone", nil)
	p.untilTainted(t, n, "occupied", n.overlapping(t, 0, 2, 2))
}

// TestBareForeignInstance: without a compute instance there is nothing to offer.
func TestBareForeignInstance(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, frequent...)
	p.ready(t)
	n.smi(t, "-i 1 -mig 1")
	n.smi(t, "mig -i 1 -cgi 3g.40gb:0")
	p.untilTainted(t, n, "occupied", n.overlapping(t, 1, 0, 4))
	for name := range n.published() {
		if strings.HasSuffix(name, "-static") {
			t.Errorf("%s is published", name)
		}
	}
	beside := n.allocate(n.names(t, []request{mig(1, "3g.40gb", 4)}))
	inIt := n.allocate(n.names(t, []request{mig(1, "3g.40gb", 0)}))
	p.mustPrepare(t, beside)
	if got := p.prepare(t, inIt)[0].GetError(); got == "" {
		t.Error("somebody's instance was completed and prepared")
	}
	p.mustUnprepare(t, beside, inIt)
	p.kill()
	p = n.start(t, frequent...)
	p.ready(t)
	n.wantInstances(t, 1, place{"3g.40gb", 0})
	if in := n.instances(t); len(in) != 1 || len(in[0].Compute) > 0 {
		t.Errorf("the instance was changed: %+v", in)
	}
	n.smi(t, "mig -i 1 -dgi")
	p.untilTainted(t, n, "occupied", nil)
}

// TestAmpereMode: the mode is the administrator's. What is published follows it
// while the driver runs, and nothing that claims do changes it.
func TestAmpereMode(t *testing.T) {
	t.Parallel()
	n := newNode(t, "a100-80x2")
	p := n.start(t, frequent...)
	p.ready(t)
	wantPublished := func(when string) {
		t.Helper()
		p.until(t, "slices "+when, func(context.Context) error {
			diff := cmp.Diff(specs(n.printed(t, true)), specs(n.api.Slices()), quantities())
			if diff != "" {
				return errors.New("slices (-printed +published):\n" + diff)
			}
			return nil
		})
	}
	wantModes := func(when string, want ...bool) {
		t.Helper()
		for i, g := range n.machine(t).GPUs {
			if g.MIG.Current != want[i] || g.MIG.Pending != want[i] {
				t.Errorf("%s: MIG mode of GPU %d is %v, pending %v, want %v", when, i, g.MIG.Current, g.MIG.Pending, want[i])
			}
		}
	}
	whole := n.allocate(n.names(t, []request{{gpu: 0}}))
	part := n.allocate(n.names(t, []request{mig(0, "2g.20gb", 2)}))
	wantPublished("with the mode off")
	if got := p.prepare(t, part)[0].GetError(); got == "" {
		t.Error("a partition was prepared with MIG mode off")
	}
	p.mustPrepare(t, whole)
	p.mustUnprepare(t, whole, part)
	wantModes("with the mode off", false, false)

	// A reset of the GPU makes a change effective.
	n.update(t, func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true })
	wantPublished("with the mode on")
	if _, found := n.published()[deviceName(n.address(t, 0), place{"2g.20gb", 2})]; !found {
		t.Error("partitions are not published with the mode on")
	}
	if got := p.prepare(t, whole)[0].GetError(); got == "" {
		t.Error("the whole GPU was prepared with MIG mode on")
	}
	p.mustPrepare(t, part)
	p.mustUnprepare(t, part, whole)
	wantModes("with the mode on", true, false)

	n.update(t, func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = false, false })
	wantPublished("with the mode off again")
	p.mustPrepare(t, whole)
	p.mustUnprepare(t, whole)
	wantModes("with the mode off again", false, false)
	n.wantClean(t)
}
