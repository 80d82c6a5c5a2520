// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/gpu"
)

// fakeForeign has claims of another driver that a test replaces.
type fakeForeign struct {
	mu     sync.Mutex
	claims []unclaimed.Claim
	err    error
	scans  int
}

func (f *fakeForeign) find(context.Context) ([]unclaimed.Claim, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.scans++
	return slices.Clone(f.claims), f.err
}

func (f *fakeForeign) set(err error, claims ...unclaimed.Claim) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.claims, f.err = claims, err
}

// newForeignRig has two GPUs, which have the minor numbers 0 and 1.
func newForeignRig(t *testing.T) (*rig, *fakeForeign) {
	t.Helper()
	r, foreign := newRig(t), &fakeForeign{}
	node := testNodeWith(firstGPU, secondGPU)
	node.GPUs[1].Minor = 1
	r.hardware.node, r.options.ForeignClaims = node, foreign.find
	return r, foreign
}

// foreignTaints are the published devices by the value of the taint, "" for those without, but for
// observers.
func foreignTaints(api *apiServer) map[string]string {
	values := map[string]string{}
	for _, s := range api.Slices() {
		for _, d := range s.Spec.Devices {
			if strings.HasSuffix(d.Name, "-observer") {
				continue
			}
			values[d.Name] = ""
			for _, taint := range d.Taints {
				if taint.Key == testDriver+"/foreign-claim" && taint.Effect == resourceapi.DeviceTaintEffectNoSchedule {
					values[d.Name] = taint.Value
				}
			}
		}
	}
	return values
}

// untilForeign waits until all devices of the two GPUs have these values.
func (r *rig) untilForeign(t *testing.T, first, second string) {
	t.Helper()
	r.until(t, "the taints of another driver's claims", func(context.Context) error {
		values := foreignTaints(r.api)
		if len(values) != 8 {
			return fmt.Errorf("%d devices", len(values))
		}
		for name, value := range values {
			want := second
			if device.IsOf(firstGPU, name) {
				want = first
			}
			if value != want {
				return fmt.Errorf("%s has %q, want %q", name, value, want)
			}
		}
		return nil
	})
}

func TestForeignClaimTaints(t *testing.T) {
	t.Parallel()
	r, foreign := newForeignRig(t)
	train := unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}, Pods: []string{"train-0"}}
	foreign.set(nil, train)
	r.start(t)
	r.untilForeign(t, "ml.train", "")
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })

	foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "infer", Devices: []string{"gpu-1-mig-1g4gb-19-0"}, Pods: []string{"infer-0", "infer-1"}})
	r.untilForeign(t, "", "ml.infer")
	// Which GPU it is cannot be told, or it is none that there is.
	for _, name := range []string{"gpu-vfio-0", "gpu-9"} {
		foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "vm", Devices: []string{name}})
		r.untilForeign(t, "ml.vm", "ml.vm")
		foreign.set(nil)
		r.untilForeign(t, "", "")
	}
	// What is found counts although there may be more.
	foreign.set(errors.New("no kubelet"), train)
	r.untilForeign(t, "ml.train", "")
	foreign.set(nil)
	r.untilForeign(t, "", "")

	r.until(t, "the events", func(context.Context) error {
		for _, want := range []string{
			"GPUForeignClaim: GPU " + firstGPU + ": claim ml/train (pod train-0) has device gpu-0 of another driver",
			"GPUForeignClaim: GPU " + secondGPU + ": claim ml/infer (pods infer-0, infer-1) has device gpu-1-mig-1g4gb-19-0",
			"GPUForeignClaim: GPUs " + firstGPU + ", " + secondGPU + ": claim ml/vm",
			"GPURecovered: GPU " + firstGPU + ": no claim of another driver has it any more. Devices are offered again as soon as no taint keeps pods away.",
		} {
			if !slices.ContainsFunc(r.events.list(), func(e string) bool { return strings.HasPrefix(e, want) }) {
				return fmt.Errorf("no event %q in %q", want, r.events.list())
			}
		}
		return nil
	})
}

// TestForeignClaimFirst: nothing is published before it is known which GPUs are in use.
func TestForeignClaimFirst(t *testing.T) {
	t.Parallel()
	r, foreign := newForeignRig(t)
	foreign.set(fmt.Errorf("%w: it has not read its pods yet", unclaimed.ErrKubelet))
	r.start(t)
	kubelet := r.register(t)
	r.until(t, "several scans", func(context.Context) error {
		foreign.mu.Lock()
		defer foreign.mu.Unlock()
		if foreign.scans < 3 {
			return fmt.Errorf("%d scans", foreign.scans)
		}
		return nil
	})
	if published := r.api.Slices(); len(published) > 0 {
		t.Errorf("%d slices are published before the kubelet has answered", len(published))
	}
	// Whatever is or was there, a pod that has ended can be cleaned up.
	r.unprepared(t, kubelet, r.claim("ended"))
	var updates atomic.Int32
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		if request.Method == http.MethodPut {
			updates.Add(1)
		}
		return nil
	})
	foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
	r.untilForeign(t, "ml.train", "")
	if n := updates.Load(); n > 0 {
		t.Errorf("the taints came with an update of what was published without them (%d updates)", n)
	}
}

// allocatedClaim stores a claim that has these devices.
func (r *rig) allocatedClaim(name string, admin bool, devices ...string) *drapb.Claim {
	c := &resourceapi.ResourceClaim{ObjectMeta: objectMeta(name), Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}}}
	for _, d := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: testDriver, Pool: testNode, Device: d}
		if admin {
			result.AdminAccess = ptr.To(true)
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
	}
	r.api.SetClaim(c)
	return &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
}

func TestPrepareBesideForeignClaims(t *testing.T) {
	t.Parallel()
	r, foreign := newForeignRig(t)
	foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
	first, second := device.GPUName(firstGPU), device.GPUName(secondGPU)
	r.claims.setLive(uses(claim.Ref{Namespace: "default", Name: "kept", UID: "uid-kept"}, first, firstGPU, nil))
	r.start(t)
	kubelet := r.register(t)
	r.untilForeign(t, "ml.train", "")

	const stranger, inUse = "which this driver does not publish", "device gpu-0000-1b-00-0: a claim of another namespace has device gpu-0 of another driver"
	for _, test := range []struct {
		name    string
		admin   bool
		devices []string
		want    string
	}{
		{"foreign", false, []string{"gpu-0"}, "the claim has device gpu-0 of another driver with this driver's name"},
		{"two", false, []string{"gpu-0", "gpu-1-mig-1g4gb-19-0", second}, "the claim has devices gpu-0, gpu-1-mig-1g4gb-19-0 of another driver"},
		{"advice", false, []string{"gpu-1"}, "so delete the pod, and replace the claim if it was not made from a template"},
		{"mixed", false, []string{second, "gpu-1"}, stranger},
		{"taken", false, []string{first}, inUse},
		{"part", false, []string{first + "-mig-1g4gb-0"}, "device gpu-0000-1b-00-0-mig-1g4gb-0: a claim of another namespace has"},
		{"free", false, []string{second}, ""},
		{"observer", true, []string{first + "-observer"}, ""},
		{"kept", false, []string{first}, ""},
	} {
		c := r.allocatedClaim(test.name, test.admin, test.devices...)
		answer, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
		if err != nil {
			t.Fatal(err)
		}
		if got := answer.Claims[c.Uid].GetError(); (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: error %q, want one with %q", test.name, got, test.want)
		}
		r.unprepared(t, kubelet, c)
	}
}

// TestPrepareBeforeForeignClaimsAreKnown: a claim for a GPU that an earlier process has discovered is
// let through while another GPU does not answer, or the kubelet does not. Whether another driver's
// claim has the GPU has to be known all the same.
func TestPrepareBeforeForeignClaimsAreKnown(t *testing.T) {
	t.Parallel()
	first := device.GPUName(firstGPU)
	kept := &resourceapi.ResourceClaim{ObjectMeta: objectMeta("kept")}
	prepared := func(uid types.UID) bool { return uid == kept.UID }
	own := func(admin bool, name string) []resourceapi.DeviceRequestAllocationResult {
		return []resourceapi.DeviceRequestAllocationResult{{Driver: testDriver, Pool: testNode, Device: name, AdminAccess: &admin}}
	}
	synctest.Test(t, func(t *testing.T) {
		foreign := &fakeForeign{}
		foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
		m := newNeighbourMonitor(foreign.find, noSoftware, time.Hour, loop.NewTrigger())
		var node *gpu.Node
		gpus := func() []gpu.GPU {
			if node == nil {
				return nil
			}
			return node.GPUs
		}
		refuse := func(c *resourceapi.ResourceClaim, own []resourceapi.DeviceRequestAllocationResult) error {
			return m.refuse(t.Context(), c.UID, own, gpus, prepared)
		}
		c := &resourceapi.ResourceClaim{ObjectMeta: objectMeta("early")}
		answer := make(chan error)
		go func() { answer <- refuse(c, own(false, first)) }()
		synctest.Wait()
		select {
		case err := <-answer:
			t.Fatalf("answered before it is known what there is: %v", err)
		default:
		}
		if err := errors.Join(refuse(kept, own(false, first)), refuse(c, own(true, first+"-observer")), refuse(c, nil)); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.refuse(ctx, c.UID, own(false, first), gpus, prepared); !errors.Is(err, context.Canceled) {
			t.Errorf("a call that was given up: %v", err)
		}

		m.firstScan(t.Context())
		var final *claim.RefusedError
		if err := <-answer; err == nil || errors.As(err, &final) {
			t.Errorf("it is not known which GPU gpu-0 is: %v", err)
		}
		if err := refuse(c, own(false, first)); err == nil || errors.As(err, &final) {
			t.Errorf("the GPUs are not known: %v", err)
		}
		node = testNodeWith(firstGPU, secondGPU)
		node.GPUs[1].Minor = 1
		if err := refuse(c, own(false, first)); !errors.As(err, &final) {
			t.Errorf("the GPU is in use: %v", err)
		}
		if err := refuse(c, own(false, device.GPUName(secondGPU))); err != nil {
			t.Error(err)
		}
		// The taints are not published yet.
		foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "late", Devices: []string{"gpu-1"}})
		_ = m.scan(t.Context())
		if err := refuse(c, own(false, first)); err != nil {
			t.Error(err)
		}
		if err := refuse(c, own(false, device.GPUName(secondGPU))); !errors.As(err, &final) {
			t.Errorf("the GPU is in use: %v", err)
		}
		foreign.set(nil)
		_ = m.scan(t.Context())
		node = nil
		if err := refuse(c, own(false, first)); err != nil {
			t.Error(err)
		}
	})
}

// TestPrepareRecalledBesideForeignClaim: another GPU does not answer when the plugin starts again.
func TestPrepareRecalledBesideForeignClaim(t *testing.T) {
	t.Parallel()
	r, foreign := newForeignRig(t)
	foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
	if err := os.MkdirAll(r.options.DataDir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, r.options.DataDir, r.options.BootID, testNodeWith(firstGPU))
	r.hardware.setOnDiscover(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	r.start(t)
	kubelet := r.register(t)
	c := r.allocatedClaim("again", false, device.GPUName(firstGPU))
	answer, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil {
		t.Fatal(err)
	}
	if got := answer.Claims[c.Uid].GetError(); !strings.Contains(got, "another driver") {
		t.Errorf("error %q", got)
	}
}

func TestTaintValue(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 58)
	for name, want := range map[string]string{"train": "ml.train", long + "--bcd": "ml." + long, long + ".b-c": "ml." + long + ".b"} {
		got := taintValue(unclaimed.Claim{Namespace: "ml", Name: name})
		if got != want || len(validation.IsValidLabelValue(got)) > 0 {
			t.Errorf("%s: %q, want %q; %v", name, got, want, validation.IsValidLabelValue(got))
		}
	}
}

func noSoftware(context.Context) []unclaimed.Finding { return nil }

// TestForeignClaimsPanic: a defect makes no GPU seem free.
func TestForeignClaimsPanic(t *testing.T) {
	t.Parallel()
	foreign, broken := &fakeForeign{}, false
	foreign.set(nil, unclaimed.Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0"}})
	m := newNeighbourMonitor(func(ctx context.Context) ([]unclaimed.Claim, error) {
		if broken {
			panic("a defect")
		}
		return foreign.find(ctx)
	}, noSoftware, time.Hour, loop.NewTrigger())
	if err := m.scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	broken = true
	if err := m.scan(t.Context()); err == nil {
		t.Error("the defect is not told")
	}
	if got := foreignConditions(m.latest.Load().claims, testNodeWith(firstGPU).GPUs); len(got) != 1 {
		t.Errorf("conditions %+v", got)
	}
}
