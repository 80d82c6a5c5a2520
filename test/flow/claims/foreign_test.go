// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// staticDevice waits until a partition that an administrator made is published as a
// static device with its UUID, and returns the name.
func staticDevice(t testing.TB, n *harness.Node, p *harness.Driver, gpu int, at harness.Place) string {
	t.Helper()
	g := n.Machine(t).GPUs[gpu]
	in := at.Find(&g)
	if in == nil || len(in.Compute) != 1 {
		t.Fatalf("GPU %d has no partition %v: %+v", gpu, at, g.MIG.Instances)
	}
	name := harness.DeviceName(g.PCIAddress, at) + "-static"
	p.Until(t, "device "+name, func(context.Context) error {
		d, found := n.Published()[name]
		if uuid := d.Attributes["uuid"].StringValue; !found || uuid == nil || *uuid != in.Compute[0].UUID {
			return errors.New("it is not published with its UUID")
		}
		return nil
	})
	return name
}

// divided starts a driver on a machine where an administrator made a partition 2g.20gb
// at 2 on GPU 0.
func divided(t *testing.T) (*harness.Node, *harness.Driver, harness.Place) {
	t.Helper()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.UntilTainted(t, n, "occupied", nil)
	n.RunSMI(t, "-i 0 -mig 1")
	n.RunSMI(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	return n, p, harness.Place{Profile: "2g.20gb", Start: 2}
}

// TestForeignPartition checks that a partition that an administrator makes while the
// driver runs is published as it is, that devices that overlap with it are tainted,
// and that all of that ends with the partition.
func TestForeignPartition(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	name := staticDevice(t, n, p, 0, at)
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))

	claim := n.AllocateNamed([]string{name})
	ids := p.MustPrepare(t, claim)
	if diff := cmp.Diff(ids, p.MustPrepare(t, claim)); diff != "" {
		t.Errorf("the second prepare gives other CDI ids (-first +second):\n%s", diff)
	}
	g := n.Machine(t).GPUs[0]
	want, err := n.WantNodes(&g, at.Find(&g))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.SpecNodes(claim.GetUid(), ids[0])
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("device nodes of the static device: %v (-want +got):\n%s", err, diff)
	}
	beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, beside)

	p.Kill()
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	n.WantInstances(t, 0, at, harness.Place{Profile: "1g.10gb", Start: 4})
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
	p.MustUnprepare(t, claim, beside)
	n.WantInstances(t, 0, at)
	if !n.MIGMode(t)[0] {
		t.Error("MIG mode was turned off although a partition is there")
	}
	if left := append(n.Records(t), n.CDISpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}

	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
	p.UntilTainted(t, n, "occupied", nil)
	p.Until(t, "the static device to go", func(context.Context) error {
		if _, found := n.Published()[name]; found {
			return errors.New("it is still published")
		}
		return nil
	})
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	p.MustPrepare(t, whole)
	p.MustUnprepare(t, whole)
	n.WantClean(t)
}

// TestForeignPartitionInTheWay checks that claims for devices that overlap with it, or
// are in its place, are refused and never change it.
func TestForeignPartitionInTheWay(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	for _, device := range []harness.Device{harness.Partition(0, "2g.20gb", 2), harness.Partition(0, "1g.10gb", 3), harness.Partition(0, "7g.80gb", 0), {GPU: 0}} {
		claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{device}))
		if got := p.Prepare(t, claim)[0].GetError(); got == "" {
			t.Errorf("%+v was prepared although somebody's partition is there", device)
		}
		n.WantInstances(t, 0, at)
		p.MustUnprepare(t, claim)
		n.WantInstances(t, 0, at)
	}
	if !n.MIGMode(t)[0] {
		t.Error("MIG mode was turned off although a partition is there")
	}
	if left := append(n.Records(t), n.CDISpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestForeignPartitionGoesWhileClaimed checks that the device stays published, tainted,
// as long as a claim has it, that the claim can have it again when the administrator has made it again, and can be
// released.
func TestForeignPartitionGoesWhileClaimed(t *testing.T) {
	t.Parallel()
	n, p, at := divided(t)
	name := staticDevice(t, n, p, 0, at)
	claim := n.AllocateNamed([]string{name})
	p.MustPrepare(t, claim)
	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
	p.UntilTainted(t, n, "gone", []string{name})
	p.UntilTainted(t, n, "occupied", nil)

	// One that is made in the same place has the same UUID: it is the device that the claim was allocated.
	n.RunSMI(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	p.UntilTainted(t, n, "gone", nil)
	ids := p.MustPrepare(t, claim)
	g := n.Machine(t).GPUs[0]
	want, err := n.WantNodes(&g, at.Find(&g))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.SpecNodes(claim.GetUid(), ids[0])
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("device nodes of the static device: %v (-want +got):\n%s", err, diff)
	}
	p.MustUnprepare(t, claim)
	n.WantInstances(t, 0, at)
	staticDevice(t, n, p, 0, at)
	p.UntilTainted(t, n, "gone", nil)
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
}

// TestBareForeignInstance checks that an instance without a compute instance is not
// published.
func TestBareForeignInstance(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	n.RunSMI(t, "-i 1 -mig 1")
	n.RunSMI(t, "mig -i 1 -cgi 3g.40gb:0")
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 1, 0, 4))
	for name := range n.Published() {
		if strings.HasSuffix(name, "-static") {
			t.Errorf("%s is published", name)
		}
	}
	beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "3g.40gb", 4)}))
	inIt := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "3g.40gb", 0)}))
	p.MustPrepare(t, beside)
	if got := p.Prepare(t, inIt)[0].GetError(); got == "" {
		t.Error("somebody's instance was completed and prepared")
	}
	p.MustUnprepare(t, beside, inIt)
	p.Kill()
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	n.WantInstances(t, 1, harness.Place{Profile: "3g.40gb", Start: 0})
	if in := n.Instances(t); len(in) != 1 || len(in[0].Compute) > 0 {
		t.Errorf("the instance was changed: %+v", in)
	}
	n.RunSMI(t, "mig -i 1 -dgi")
	p.UntilTainted(t, n, "occupied", nil)
}

// TestAmpereMode checks that MIG mode is left to the administrator: what is published
// follows it while the driver runs, and claims never change it.
func TestAmpereMode(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "a100-80x2")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	wantPublished := func(when string) {
		t.Helper()
		p.Until(t, "slices "+when, func(context.Context) error {
			diff := cmp.Diff(specs(printedSlices(t, n, true)), specs(n.API.Slices()), quantities())
			if diff != "" {
				return errors.New("slices (-printed +published):\n" + diff)
			}
			return nil
		})
	}
	wantModes := func(when string, want ...bool) {
		t.Helper()
		for i, g := range n.Machine(t).GPUs {
			if g.MIG.Current != want[i] || g.MIG.Pending != want[i] {
				t.Errorf("%s: MIG mode of GPU %d is %v, pending %v, want %v", when, i, g.MIG.Current, g.MIG.Pending, want[i])
			}
		}
	}
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	part := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "2g.20gb", 2)}))
	wantPublished("with the mode off")
	if got := p.Prepare(t, part)[0].GetError(); got == "" {
		t.Error("a partition was prepared with MIG mode off")
	}
	p.MustPrepare(t, whole)
	p.MustUnprepare(t, whole, part)
	wantModes("with the mode off", false, false)

	// A reset of the GPU makes a change effective.
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true })
	wantPublished("with the mode on")
	if _, found := n.Published()[harness.DeviceName(n.Address(t, 0), harness.Place{Profile: "2g.20gb", Start: 2})]; !found {
		t.Error("partitions are not published with the mode on")
	}
	if got := p.Prepare(t, whole)[0].GetError(); got == "" {
		t.Error("the whole GPU was prepared with MIG mode on")
	}
	p.MustPrepare(t, part)
	p.MustUnprepare(t, part, whole)
	wantModes("with the mode on", true, false)

	n.Update(t, func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = false, false })
	wantPublished("with the mode off again")
	p.MustPrepare(t, whole)
	p.MustUnprepare(t, whole)
	wantModes("with the mode off again", false, false)
	n.WantClean(t)
}
