// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

var (
	firstName = device.GPUName(firstGPU)
	onePart   = firstName + "-mig-1g4gb-0"
)

// stepper takes the steps of a node loop one by one, in a time of its own.
type stepper struct {
	*rig
	loop *gpuLoop
	now  time.Time
	// published is what the loop has handed on.
	published *device.Inventory
	ctx       context.Context //nolint:containedctx // of a test, with its logger
}

// newStepper has discovered one GPU under a policy that offers everything but shares.
func newStepper(t *testing.T) *stepper {
	t.Helper()
	s := newIdleStepper(t)
	s.discover()
	return s
}

func newIdleStepper(t *testing.T) *stepper {
	t.Helper()
	quiet := klog.NewContext(t.Context(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig()))
	s := &stepper{rig: newRig(t), now: time.Unix(0, 0), ctx: quiet}
	s.build(t)
	s.loop = s.plugin.gpus
	s.loop.publish = func(w *wanted) {
		if w.certain {
			s.published = w.inventory
		}
	}
	s.loop.desired.now = func() time.Time { return s.now }
	s.plugin.service.startup.finish()
	s.plugin.service.neighbours.firstScan(quiet)
	s.plugin.node.now.Store(nodeOf("v1.36.0")) // Run reads the node
	return s
}

func (s *stepper) discover() {
	s.loop.desired.readStored(s.ctx)
	s.loop.take(s.ctx, s.loop.discovery.discover(s.ctx))
}

// poll is what happens after some time.
func (s *stepper) poll(later time.Duration) {
	s.now = s.now.Add(later)
	s.loop.desired.readStored(s.ctx)
	s.loop.rebuild(s.ctx)
	s.loop.reconcile(s.ctx)
}

// withdrawn returns the names of the withdrawn devices, without that of their GPU.
func (s *stepper) withdrawn() string {
	s.claims.mu.Lock()
	defer s.claims.mu.Unlock()
	var short []string
	for _, name := range s.claims.inventory.Withdrawn() {
		short = append(short, strings.TrimPrefix(name, firstName+"-"))
	}
	return strings.Join(short, " ")
}

func (s *stepper) want(t *testing.T, withdrawn, when string) {
	t.Helper()
	if got := s.withdrawn(); got != withdrawn {
		t.Errorf("%s: withdrawn are %q, want %q", when, got, withdrawn)
	}
}

// handedOn reports whether the publisher was given anything.
func (s *stepper) handedOn() bool { return s.published != nil }

const allParts = "mig-1g4gb-0 mig-1g4gb-1 mig-2g8gb-0"

// TestWithdrawal: a device disappears when it was not needed for the time of grace,
// and stays as long as a claim has it.
func TestWithdrawal(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	s.poll(0)
	s.want(t, "", "at first")
	s.policy.set(onlyWhole(), nil)
	s.poll(time.Second)
	s.want(t, allParts, "under the new policy")
	s.claims.setInUse(onePart)
	s.poll(withdrawalGrace - time.Second)
	s.want(t, allParts, "before the time of grace is over")
	s.poll(time.Second)
	s.want(t, "mig-1g4gb-0", "while a claim has one")
	s.claims.setInUse()
	s.poll(time.Hour)
	s.want(t, "", "after an hour")
	s.claims.setInUse(onePart)
	s.poll(time.Second)
	s.want(t, "mig-1g4gb-0", "for a claim that was not known")
	s.policy.set(withoutShares(), nil)
	s.poll(time.Second)
	s.want(t, "", "when all is offered again")
}

// TestNothingNew: a poll that finds nothing new gives everybody the inventory of the last one.
func TestNothingNew(t *testing.T) {
	s := newStepper(t)
	s.poll(0)
	before := s.published
	if s.poll(time.Second); before == nil || s.published != before {
		t.Error("the inventory is another one although nothing has changed")
	}
	s.policy.set(onlyWhole(), nil)
	if s.poll(time.Second); s.published == before {
		t.Error("the inventory is the same although the policy has changed")
	}
}

// TestInUseFromTheStart: the kubelet asks for the devices of its pods as soon as it
// can, whether or not they were published before.
func TestInUseFromTheStart(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.policy.set(onlyWhole(), nil)
	s.claims.setInUse(onePart)
	s.discover()
	s.want(t, "mig-1g4gb-0", "at first")
}

// TestRequested: a device that the kubelet asks for is allocated. It stays even if
// preparing it fails again and again.
func TestRequested(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	s.policy.set(onlyWhole(), nil)
	s.poll(time.Second)
	s.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error { return errors.New("no supervisor") }
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Driver: testDriver, Pool: testNode, Device: onePart},
			{Driver: "other.example.com", Pool: testNode, Device: firstName + "-mig-2g8gb-0"},
			{Driver: testDriver, Pool: "other-node", Device: firstName + "-mig-2g8gb-0"},
		}},
	}}}
	for range 3 {
		s.plugin.service.prepare(s.ctx, claim)
		s.poll(withdrawalGrace - time.Second)
	}
	s.want(t, "mig-1g4gb-0", "while it is requested")
	s.poll(withdrawalGrace)
	s.want(t, "", "when it is not requested any more")
	// Whatever happened before.
	s.plugin.service.prepare(s.ctx, claim)
	s.poll(time.Second)
	s.want(t, "mig-1g4gb-0", "when it is requested again")
	s.plugin.service.prepare(s.ctx, &resourceapi.ResourceClaim{})
}

// TestUseNotKnown: with a journal that cannot be read all devices stay, and those
// that the policy does not offer are withdrawn all the same.
func TestUseNotKnown(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	s.policy.set(onlyWhole(), nil)
	s.claims.inUseErr = errors.New("input/output error")
	s.poll(time.Second)
	s.want(t, allParts, "under the new policy")
	s.poll(time.Hour)
	s.want(t, allParts, "after an hour")
	s.claims.inUseErr = nil
	s.poll(time.Second)
	s.want(t, allParts, "before the time of grace is over")
	s.poll(withdrawalGrace)
	s.want(t, "", "in the end")
}

// TestPolicyNotKnown: without a valid policy, claims can have every device that was
// published.
func TestPolicyNotKnown(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	s.policy.set(nil, errors.New("odd"))
	s.loop.desired.markNeeded(onePart)
	s.discover()
	s.poll(time.Hour)
	s.poll(time.Hour)
	s.want(t, "mig-1g4gb-0", "while the policy cannot be read")
	if s.handedOn() {
		t.Error("something is published without a policy")
	}
	s.policy.set(onlyWhole(), nil)
	s.poll(time.Second)
	s.want(t, "mig-1g4gb-0", "when it can")
	if !s.handedOn() {
		t.Error("nothing is published")
	}
	s.poll(withdrawalGrace)
	s.want(t, "", "after the time of grace")
}

// TestPolicyAtFailedDiscovery: a policy that is read by a discovery which fails
// comes into force.
func TestPolicyAtFailedDiscovery(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	s.policy.set(onlyWhole(), nil)
	s.hardware.setOnDiscover(func(context.Context) error { return &gpu.PendingError{Call: "nvmlDeviceGetCount_v2"} })
	s.discover()
	s.poll(time.Second)
	s.want(t, allParts, "under the new policy")
}

// TestNeededIsBounded: devices that claims had long ago are forgotten.
func TestNeededIsBounded(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	for n := range 100 {
		s.claims.setInUse(firstName + "-mig-1g4gb-" + strings.Repeat("1", n))
		s.poll(time.Minute)
	}
	if got := len(s.loop.desired.needed); got > 20 {
		t.Errorf("%d names are remembered", got)
	}
}

// TestPublishedEarlier: the plugin before was stopped in the middle of an update, and
// the API server is away at first. Until it is known what was published nothing else
// is.
func TestPublishedEarlier(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	for generation, name := range map[int64]string{7: onePart, 8: firstName} {
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "before-"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: testDriver, NodeName: &s.options.NodeName, Devices: []resourceapi.Device{{Name: name}},
				Pool: resourceapi.ResourcePool{Name: testNode, Generation: generation, ResourceSliceCount: 2},
			},
		}
		if _, err := s.options.KubeClient.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	s.policy.set(onlyWhole(), nil)
	s.api.Refuse(func(*http.Request) *apierrors.StatusError {
		return apierrors.NewInternalError(errors.New("etcd is away"))
	})
	s.discover()
	s.poll(time.Second)
	if s.handedOn() {
		t.Error("something is published before it is known what was")
	}
	if reason := s.plugin.readiness.notReady(); !strings.Contains(reason, "etcd is away") {
		t.Errorf("not ready because %q", reason)
	}
	s.api.Refuse(nil)
	s.poll(time.Hour)
	s.want(t, "mig-1g4gb-0", "when it is known what was published")
	if !s.handedOn() {
		t.Error("nothing is published")
	}
	s.poll(withdrawalGrace)
	s.want(t, "", "after the time of grace")
}

// TestPolicyIsReported: a line for each GPU, at the start, after a change, and when
// another GPU comes.
func TestPolicyIsReported(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	logger := ktesting.NewLogger(nopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	s.ctx = klog.NewContext(t.Context(), logger)
	step := func(want ...string) {
		t.Helper()
		before := len(sink.GetBuffer().Data())
		s.discover()
		s.poll(0)
		var got []string
		for _, entry := range sink.GetBuffer().Data()[before:] {
			if strings.Contains(strings.ToLower(entry.Message), "sharing policy") {
				got = append(got, fmt.Sprint(entry.Message, entry.ParameterKVList))
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("lines (-want +got):\n%s", diff)
		}
	}
	line := func(address, offers string) string {
		return "Sharing policy[pciAddress " + address + " productName Test GPU offers " + offers + "]"
	}
	const all, whole = "default: gpu; mig all profiles but variants", "default: gpu"
	step(line(firstGPU, all))
	step()
	s.hardware.setNode(testNodeWith(firstGPU, secondGPU))
	step(line(secondGPU, all))
	s.policy.set(onlyWhole(), nil)
	step(line(firstGPU, whole), line(secondGPU, whole))
	s.policy.set(nil, errors.New("odd"))
	step("The sharing policy cannot be used, the last valid one stays in force[]")
	step()
	s.policy.set(s.loop.desired.policy, nil)
	step("The sharing policy can be used again[]")
	want := []string{reasonPolicyInvalid + ": odd", reasonPolicyValid + ": The sharing policy can be used again"}
	if got := s.events.list(); !slices.Equal(got, want) {
		t.Errorf("events: %q", got)
	}
}
