// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/fakekubelet"
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
	p.UntilTrue(t, "device "+name+" to be published with its UUID", func() bool {
		d, found := n.Published()[name]
		uuid := d.Attributes["uuid"].StringValue
		return found && uuid != nil && *uuid == in.Compute[0].UUID
	})
	return name
}

// divided starts a driver on a machine where an administrator made a partition 2g.20gb
// at 2 on GPU 0.
func divided(t *testing.T) (*harness.Node, *harness.Driver, harness.Place) {
	t.Helper()
	n, p := harness.NewDriver(t, "h100x2", harness.Frequent...)
	p.UntilTainted(t, n, "occupied", nil)
	n.RunSMI(t, "-i 0 -mig 1")
	n.RunSMI(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	return n, p, harness.Place{Profile: "2g.20gb", Start: 2}
}

// removePartitions removes the partitions of GPU 0, as an administrator does.
func removePartitions(t *testing.T, n *harness.Node) {
	t.Helper()
	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
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
	n.WantDevice(t, claim, ids[0], harness.Partition(0, at.Profile, at.Start))
	beside, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))

	p.Kill()
	p = n.Run(t, harness.Frequent...)
	expect.Same(t, p.MustPrepare(t, claim), ids, "CDI ids of the second prepare")
	n.WantInstances(t, 0, at, harness.Place{Profile: "1g.10gb", Start: 4})
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
	p.MustUnprepare(t, claim, beside)
	n.WantInstances(t, 0, at)
	if !n.MIGMode(t)[0] {
		t.Error("MIG mode was turned off although a partition is there")
	}
	expect.Len(t, append(n.Records(t), n.CDISpecs(t)...), 0, "left")

	removePartitions(t, n)
	p.UntilTainted(t, n, "occupied", nil)
	p.UntilTrue(t, "the static device to go", func() bool {
		_, found := n.Published()[name]
		return !found
	})
	p.WantFree(t, n, harness.Device{GPU: 0})
	n.WantClean(t)
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
	removePartitions(t, n)
	p.UntilTainted(t, n, "gone", []string{name})
	p.UntilTainted(t, n, "occupied", nil)

	// One that is made in the same place has the same UUID: it is the device that the claim was allocated.
	n.RunSMI(t, "mig -i 0 -cgi 2g.20gb:2 -C")
	p.UntilTainted(t, n, "gone", nil)
	n.WantDevice(t, claim, p.MustPrepare(t, claim)[0], harness.Partition(0, at.Profile, at.Start))
	p.MustUnprepare(t, claim)
	n.WantInstances(t, 0, at)
	staticDevice(t, n, p, 0, at)
	p.UntilTainted(t, n, "gone", nil)
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
}

// TestAmpereMode checks that MIG mode is left to the administrator: what is published
// follows it while the driver runs, and claims never change it.
func TestAmpereMode(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "a100-80x2", harness.Frequent...)
	whole := n.Allocate(t, []harness.Device{{GPU: 0}})
	part := n.Allocate(t, []harness.Device{harness.Partition(0, "2g.20gb", 2)})
	for _, on := range []bool{false, true, false} {
		// A reset of the GPU makes a change effective.
		n.Update(t, func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = on, on })
		untilPrinted(t, p, n)
		good, bad := whole, part
		if on {
			good, bad = part, whole
		}
		if got := p.Prepare(t, bad)[0].GetError(); got == "" {
			t.Errorf("MIG mode on: %t, and claim %s is prepared", on, bad.GetName())
		}
		p.MustPrepare(t, good)
		p.MustUnprepare(t, good, bad)
		for i, g := range n.Machine(t).GPUs {
			if want := on && i == 0; g.MIG.Current != want || g.MIG.Pending != want {
				t.Errorf("MIG mode of GPU %d is %v, pending %v, want %v", i, g.MIG.Current, g.MIG.Pending, want)
			}
		}
	}
	n.WantClean(t)
}

// TestInstancesAtBoot: partitions that the NVIDIA driver makes when it is loaded are nobody's claim's. They
// are published as they are, what overlaps them is tainted from the first look on, and nothing changes them.
func TestInstancesAtBoot(t *testing.T) {
	t.Parallel()
	at := harness.Place{Profile: "2g.20gb", Start: 2}
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) {
		mig := m.GPUs[0].MIG
		mig.Current, mig.Pending = true, true
		for i := range mig.Profiles {
			if p := &mig.Profiles[i]; p.Name == at.Profile {
				in := p.Instance(1, "MIG-6f0c1c54-1f0e-5b8a-9a59-3d3a3a0f3a11")
				all := p.Compute[len(p.Compute)-1]
				in.Compute[0].ProfileID, in.Compute[0].Placement.Size = all.ID, all.Slices
				mig.Instances = []machine.GPUInstance{in}
			}
		}
	})
	before := n.Instances(t)
	p := n.Run(t)
	name := staticDevice(t, n, p, 0, at)
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
	p.WantTaken(t, n, "beside a partition of somebody else", harness.Device{GPU: 0}, harness.Partition(0, "1g.10gb", 3), harness.Partition(0, "2g.20gb", 2))

	static := n.AllocateNamed([]string{name})
	p.MustPrepare(t, static)
	p.WantFree(t, n, harness.Partition(0, "1g.10gb", 4))
	p.MustUnprepare(t, static)
	expect.Same(t, n.Instances(t), before, "instances since boot")
	if !n.MIGMode(t)[0] {
		t.Error("MIG mode is off although there is a partition")
	}
}

const foreignClaim = "foreign-claim"

// TestForeignClaim: NVIDIA's driver is stopped, a pod of it runs, and this driver starts for the
// first time. It starts again while the pod runs, and then the pod ends.
func TestForeignClaim(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	kubelet := fakekubelet.Serve(t, n.PodResources)
	gpu := harness.DeviceName(n.Address(t, 0), harness.Place{})
	var offered atomic.Bool // a device of the first GPU was published without the taint
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		for name, d := range n.Published() {
			tainted := slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == harness.DriverName+"/"+foreignClaim })
			if r.Method == http.MethodPut && strings.HasPrefix(name, gpu) && !tainted {
				offered.Store(true)
			}
		}
		return nil
	})
	n.API.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "train", UID: "uid-of-train"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: harness.DriverName, Pool: harness.NodeName, Device: "gpu-0"}},
		}}},
	})
	kubelet.Set(fakekubelet.Pod("ml", "train-0", "train", fakekubelet.Device{Driver: harness.DriverName, Pool: harness.NodeName, Name: "gpu-0"}))
	p := n.Run(t, harness.Frequent...)
	taken := n.DevicesOf(t, 0)
	if len(taken) < 2 {
		t.Fatalf("devices of the first GPU: %v", taken)
	}
	p.UntilTainted(t, n, foreignClaim, taken)
	p.UntilEvent(t, n, "GPUForeignClaim", "ml/train", "train-0", "gpu-0")
	// The scheduler may not have seen the taint in time.
	p.WantTaken(t, n, "beside a claim of another driver", harness.Partition(0, "1g.10gb", 0))
	beside, _ := p.NewClaim(t, n, harness.Partition(1, "1g.10gb", 0))

	p.Kill()
	p = n.Run(t, harness.Frequent...)
	p.UntilTainted(t, n, foreignClaim, taken)
	if offered.Load() {
		t.Error("the first GPU was published without the taint")
	}
	p.MustPrepare(t, beside)

	// The pod ends: the kubelet asks whichever driver is registered.
	p.MustUnprepare(t, &drapb.Claim{Namespace: "ml", Name: "train", Uid: "uid-of-train"})
	n.API.DeleteClaim("ml", "train")
	kubelet.Set(fakekubelet.Pod("ml", "other", ""))
	p.UntilTainted(t, n, foreignClaim, nil)
	p.WantFree(t, n, harness.Partition(0, "1g.10gb", 0))
	p.MustUnprepare(t, beside)
	n.WantClean(t)
}
