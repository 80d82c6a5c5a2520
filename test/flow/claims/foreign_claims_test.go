// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/fakekubelet"
	"github.com/partage-dev/partage/test/flow/harness"
)

const foreignClaim = "foreign-claim"

// moved is a node on which NVIDIA's driver ran before, with two GPUs, and the kubelet, which knows
// of its claims.
type moved struct {
	*harness.Node
	kubelet *fakekubelet.PodResources
	// offered is set when a device of the first GPU was published without the taint.
	offered atomic.Bool
}

func newMoved(t *testing.T) *moved {
	t.Helper()
	n := &moved{Node: harness.NewNode(t, "h100x2")}
	n.kubelet = fakekubelet.Serve(t, n.PodResources)
	return n
}

// watchOffers has every update of a slice checked: none may be about a first GPU that was published
// without the taint.
func (n *moved) watchOffers(t *testing.T) {
	t.Helper()
	devices := harness.DeviceName(n.Address(t, 0), harness.Place{})
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodPut && n.offers(devices) {
			n.offered.Store(true)
		}
		return nil
	})
}

// offers reports whether a device of a GPU is published without the taint.
func (n *moved) offers(gpu string) bool {
	for name, d := range n.Published() {
		tainted := slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == harness.DriverName+"/"+foreignClaim })
		if strings.HasPrefix(name, gpu) && !tainted {
			return true
		}
	}
	return false
}

// nvidias is a device of NVIDIA's driver.
func nvidias(name string) fakekubelet.Device {
	return fakekubelet.Device{Driver: harness.DriverName, Pool: harness.NodeName, Name: name}
}

// foreign stores a claim that NVIDIA's driver has prepared, and returns its pod.
func (n *moved) foreign(name string, admin bool, devices ...string) *podresourcesapi.PodResources {
	allocation := &resourceapi.AllocationResult{}
	var known []fakekubelet.Device
	for _, device := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: harness.DriverName, Pool: harness.NodeName, Device: device}
		if admin {
			result.AdminAccess = ptr.To(true)
		}
		allocation.Devices.Results = append(allocation.Devices.Results, result)
		known = append(known, nvidias(device))
	}
	n.API.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID("uid-of-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	})
	return fakekubelet.Pod("ml", name+"-0", name, known...)
}

// untilFirstIsTaken waits until the first GPU is tainted with all its devices, and the second is not.
func (n *moved) untilFirstIsTaken(t *testing.T, p *harness.Driver) {
	t.Helper()
	p.Ready(t)
	first := n.DevicesOf(t, 0)
	if len(first) < 2 {
		t.Fatalf("devices of the first GPU: %v", first)
	}
	p.UntilTainted(t, n.Node, foreignClaim, first)
	if n.offered.Load() {
		t.Error("the first GPU was published without the taint")
	}
}

// TestForeignClaim: NVIDIA's driver is stopped, a pod of it runs, and this driver starts for the
// first time. It starts again while the pod runs, and then the pod ends.
func TestForeignClaim(t *testing.T) {
	t.Parallel()
	n := newMoved(t)
	n.watchOffers(t)
	n.kubelet.Set(n.foreign("train", false, "gpu-0"))
	p := n.Start(t, harness.Frequent...)
	n.untilFirstIsTaken(t, p)
	p.UntilEvent(t, n.Node, "GPUForeignClaim", "claim ml/train (pod train-0) has device gpu-0 of another driver")

	// The scheduler may not have seen the taint in time.
	taken := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	if got := p.Prepare(t, taken)[0].GetError(); !strings.Contains(got, "a claim of another namespace has device gpu-0") || strings.Contains(got, "train") {
		t.Errorf("a part of the GPU that is in use: error %q", got)
	}
	beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 0)}))
	p.MustPrepare(t, beside)

	p.Kill()
	p = n.Start(t, harness.Frequent...)
	n.untilFirstIsTaken(t, p)
	p.MustPrepare(t, beside)

	// The pod ends: the kubelet asks whichever driver is registered.
	p.MustUnprepare(t, &drapb.Claim{Namespace: "ml", Name: "train", Uid: "uid-of-train"})
	n.API.DeleteClaim("ml", "train")
	n.kubelet.Set(fakekubelet.Pod("ml", "other", ""))
	p.UntilTainted(t, n.Node, foreignClaim, nil)
	p.UntilEvent(t, n.Node, "GPURecovered", "no claim of another driver has it any more")
	p.MustPrepare(t, taken)
	p.MustUnprepare(t, taken, beside)
	n.WantClean(t)
}

// TestForeignClaimEndsWhileDown: the pod ends while this driver does not run.
func TestForeignClaimEndsWhileDown(t *testing.T) {
	t.Parallel()
	n := newMoved(t)
	n.kubelet.Set(n.foreign("train", false, "gpu-0"))
	p := n.Start(t, harness.Frequent...)
	n.untilFirstIsTaken(t, p)
	p.Kill()
	n.API.DeleteClaim("ml", "train")
	n.kubelet.Set(fakekubelet.Pod("ml", "other", ""))
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.UntilTainted(t, n.Node, foreignClaim, nil)
}

// TestForeignClaimOfParts: partitions, which NVIDIA's driver has left on the GPU, are not offered as
// partitions of somebody else while a claim has one.
func TestForeignClaimOfParts(t *testing.T) {
	t.Parallel()
	n := newMoved(t)
	n.RunSMI(t, "-i 0 -mig 1")
	n.RunSMI(t, "mig -i 0 -cgi 1g.10gb:0 -C")
	n.watchOffers(t)
	n.kubelet.Set(n.foreign("infer", false, "gpu-0-mig-1g10gb-19-0"))
	p := n.Start(t, harness.Frequent...)
	n.untilFirstIsTaken(t, p)
	static := staticDevice(t, n.Node, p, 0, harness.Place{Profile: "1g.10gb", Start: 0})
	if !slices.Contains(n.DevicesOf(t, 0), static) || n.offers(static) {
		t.Error("the partition is offered")
	}
	n.kubelet.Set(fakekubelet.Pod("ml", "other", ""))
	p.UntilTainted(t, n.Node, foreignClaim, nil)
}

// TestForeignClaimsThatDoNotMatter are claims that use nothing of this driver's pool, and this
// driver's own, also of devices that the policy does not offer any more.
func TestForeignClaimsThatDoNotMatter(t *testing.T) {
	t.Parallel()
	n := newMoved(t)
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	part := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	p.MustPrepare(t, part)
	own := n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)})[0]
	p.Kill()

	n.kubelet.Set(
		n.foreign("exporter", true, "gpu-0", "gpu-1"),
		fakekubelet.Pod("ml", "part", "part", nvidias(own), fakekubelet.Device{Driver: "compute-domain.nvidia.com", Pool: harness.NodeName, Name: "channel-0"}),
		fakekubelet.Pod("ml", "elsewhere", "elsewhere", fakekubelet.Device{Driver: harness.DriverName, Pool: "other", Name: "gpu-0"}),
		fakekubelet.Pod("ml", "gone", "gone", nvidias("gpu-0000-ff-00-0-timeslice")),
	)
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\ndefault: {kinds: [gpu]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p = n.Start(t, append([]string{"--policy-file=" + policy}, harness.Frequent...)...)
	p.Ready(t)
	p.UntilTainted(t, n.Node, "withdrawn", n.withdrawn(t))
	asked := n.kubelet.Asked()
	p.Until(t, "more questions to the kubelet", func(context.Context) error {
		if n.kubelet.Asked() < asked+3 {
			return errors.New("not yet")
		}
		return nil
	})
	p.UntilTainted(t, n.Node, foreignClaim, nil)
	p.MustUnprepare(t, part)
}

// withdrawn are the published devices that the policy whole does not offer.
func (n *moved) withdrawn(t *testing.T) []string {
	t.Helper()
	var names []string
	for gpu := range 2 {
		for _, name := range n.DevicesOf(t, gpu) {
			if name != harness.DeviceName(n.Address(t, gpu), harness.Place{}) {
				names = append(names, name)
			}
		}
	}
	return names
}

// TestForeignClaimToPrepare: the kubelet asks for a claim that the scheduler has allocated from the
// ResourceSlices of NVIDIA's driver just before they were replaced. It uses nothing, so that nothing is tainted.
func TestForeignClaimToPrepare(t *testing.T) {
	t.Parallel()
	n := newMoved(t)
	n.kubelet.Set(fakekubelet.Pod("ml", "other", ""))
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	late := n.AllocateNamed([]string{"gpu-0-mig-1g10gb-19-3"})
	n.API.Reserve(late.GetNamespace(), late.GetName(), "late-0")
	for range 2 {
		got := p.Prepare(t, late)[0].GetError()
		for _, want := range []string{"device gpu-0-mig-1g10gb-19-3 of another driver with this driver's name, such as NVIDIA's DRA driver", "delete the pod"} {
			if !strings.Contains(got, want) {
				t.Errorf("error %q, want %q in it", got, want)
			}
		}
	}
	p.UntilTainted(t, n.Node, foreignClaim, nil)
	p.MustUnprepare(t, late)
	n.WantClean(t)
}
