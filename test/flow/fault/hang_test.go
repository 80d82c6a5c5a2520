// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// impatient makes the driver call a GPU hung as soon as it may. A call that is only slow may
// then be taken for one that hangs: the tests repeat what was refused for that.
var impatient = slices.Concat(harness.Frequent, []string{"--nvml-call-limit=10s"})

// TestHang checks what happens while a call on one GPU does not return: the GPU is reported
// and tainted, its pods can end, and all other GPUs work. When the call returns at last,
// everything recovers.
func TestHang(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		// hangs is the operation that the call belongs to.
		hangs harness.Operation
	}{
		"observe":                   {"nvmlDeviceGetMigMode", harness.Prepare},
		"create":                    {"nvmlDeviceCreateGpuInstanceWithPlacement", harness.Prepare},
		"create compute instance":   {"nvmlGpuInstanceCreateComputeInstance", harness.Prepare},
		"destroy":                   {"nvmlGpuInstanceDestroy", harness.Unprepare},
		"observe before destroying": {"nvmlDeviceGetGpuInstances", harness.Unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newHang(t, test.function, test.hangs).run(t)
		})
	}
}

// hang is a driver with one call on GPU 0 that does not return.
type hang struct {
	n     *harness.Node
	p     *harness.Driver
	fault *harness.Fault
	// earlier was prepared before, stuck is the claim whose call hangs.
	earlier, stuck *drapb.Claim
	operation      harness.Operation
	function       string
}

func newHang(t *testing.T, function string, o harness.Operation) *hang {
	t.Helper()
	h := &hang{n: harness.NewNode(t, "h100x3"), operation: o, function: function}
	h.p = h.n.Start(t, impatient...)
	h.p.Ready(t)
	h.earlier = h.n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)})
	h.p.MustPrepare(t, h.earlier)
	h.stuck = h.n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)})
	if o == harness.Unprepare {
		h.p.MustPrepare(t, h.stuck)
	}
	// What is in the way takes effect when it is let go.
	h.fault = h.n.Inject(t, machine.Fault{Function: function, GPU: 0, Hang: true, Effect: machine.Proceed})
	return h
}

func (h *hang) run(t *testing.T) {
	answer := h.begin(t)
	h.othersWork(t)
	h.checkAnswer(t, <-answer)
	h.othersWork(t)

	third := h.n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 6)})
	h.checkNamed(t, h.p.Prepare(t, third)[0].GetError())
	h.p.UntilTainted(t, h.n, "unresponsive", h.n.DevicesOf(t, 0))
	h.p.UntilEvent(t, h.n, "GPUUnresponsive", h.n.Address(t, 0))

	// Pods can end, and it is not forgotten that something is to be done.
	h.p.MustUnprepare(t, h.earlier, h.stuck, third)
	expect.Len(t, h.n.CDISpecs(t), 0, "CDI files are left")
	if r, err := h.n.Record(h.earlier.GetUid()); err != nil || r == nil || r.State != harness.StateReleasing {
		t.Errorf("the journal says %+v of a claim whose partition could not be removed (%v)", r, err)
	}
	h.othersWork(t)

	h.fault.Remove(t)
	h.p.UntilClean(t, h.n)
	h.p.UntilTainted(t, h.n, "unresponsive", nil)
	again, ids := h.p.NewClaim(t, h.n, harness.Partition(0, "1g.10gb", 4))
	expect.Do(t, h.n.CheckPrepared(again.GetUid(), ids, 0, harness.Place{Profile: "1g.10gb", Start: 4}))
	h.p.MustUnprepare(t, again)
	h.p.UntilClean(t, h.n)
	if on := h.n.MIGMode(t)[0]; on {
		t.Error("MIG mode is on although nothing is left")
	}
}

// begin makes the call and returns when it hangs. A call before the one that is to
// hang may have been slow.
func (h *hang) begin(t *testing.T) (answer chan error) {
	t.Helper()
	for {
		answer = make(chan error, 1)
		go func() {
			_, err := h.p.Call(t.Context(), h.operation, h.stuck, harness.KubeletTimeout)
			answer <- err
		}()
		var early error
		h.p.Until(t, "a call that hangs", func(context.Context) error {
			select {
			case early = <-answer:
				return nil
			default:
			}
			return h.fault.CheckStruck()
		})
		if early == nil || !harness.IsHung(early) || strings.Contains(early.Error(), h.function) {
			if early != nil {
				answer <- early
			}
			return answer
		}
	}
}

// othersWork prepares and unprepares on all GPUs but the first.
func (h *hang) othersWork(t *testing.T) {
	t.Helper()
	for gpu := 1; gpu < 3; gpu++ {
		h.p.WantFree(t, h.n, harness.Device{GPU: gpu})
		h.p.WantFree(t, h.n, harness.Partition(gpu, "2g.20gb", 2))
	}
}

// checkAnswer fails unless a Prepare failed with a reason, or an Unprepare succeeded, so
// that the pod can end.
func (h *hang) checkAnswer(t *testing.T, err error) {
	t.Helper()
	switch {
	case h.operation == harness.Unprepare && err != nil:
		t.Errorf("unprepare with a call that hangs: %v", err)
	case h.operation == harness.Prepare && err == nil:
		t.Error("prepared although a call hangs")
	case h.operation == harness.Prepare:
		h.checkNamed(t, err.Error())
	}
}

// checkNamed fails unless the error names the call that hangs and its GPU.
func (h *hang) checkNamed(t *testing.T, got string) {
	t.Helper()
	for _, want := range []string{h.function, h.n.Address(t, 0), "has not returned"} {
		expect.Contains(t, got, want)
	}
}

// TestHangAtStart checks that the driver's start does not wait for calls that hang.
func TestHangAtStart(t *testing.T) {
	t.Parallel()
	t.Run("library", func(t *testing.T) {
		t.Parallel()
		n := harness.NewNode(t, "h100x2")
		fault := n.Inject(t, machine.Fault{Function: "nvmlInitWithFlags", GPU: -1, Hang: true, Effect: machine.Proceed})
		p := n.Start(t, impatient...)
		fault.UntilStruck(t, p)
		p.Until(t, "liveness", p.Check("liveness"))
		claim := n.Allocate(t, []harness.Device{{GPU: 1}})
		if got := p.Prepare(t, claim)[0].GetError(); !strings.Contains(got, "nvmlInitWithFlags") {
			t.Errorf("the error does not name the call that hangs: %q", got)
		}
		p.MustUnprepare(t, claim)
		expect.Fails(t, p.Check("readiness")(t.Context()), "ready without an NVML session")
		fault.Remove(t)
		p.Ready(t)
		p.UntilPublished(t, n, 0, 1)
		p.MustPrepare(t, claim)
		p.MustUnprepare(t, claim)
		n.WantClean(t)
	})
	t.Run("GPU", func(t *testing.T) {
		t.Parallel()
		n := harness.NewNode(t, "h100x3")
		fault := n.Inject(t, machine.Fault{Function: "nvmlDeviceGetUUID", GPU: 1, Hang: true, Effect: machine.Proceed})
		p := n.Run(t, impatient...)
		p.UntilPublished(t, n, 0, 2)
		for _, gpu := range []int{0, 2} {
			p.WantFree(t, n, harness.Partition(gpu, "1g.10gb", 4))
		}
		p.UntilEvent(t, n, "GPUUnresponsive", n.Address(t, 1))
		fault.Remove(t)
		p.UntilPublished(t, n, 0, 1, 2)
		p.WantFree(t, n, harness.Partition(1, "1g.10gb", 4))
		n.WantClean(t)
	})
}

// TestHangAtRestart checks that a GPU that hangs when the driver starts again holds up no
// claim on another one, and stays published, tainted.
func TestHangAtRestart(t *testing.T) {
	t.Parallel()
	for _, function := range []string{"nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetGpuInstances"} {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			p := n.Start(t, impatient...)
			p.UntilPublished(t, n, 0, 1)
			stuck, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
			devices := n.DevicesOf(t, 0)
			p.Kill()
			fault := n.Inject(t, machine.Fault{Function: function, GPU: 0, Hang: true, Effect: machine.Proceed})
			// The driver leaves the call behind only after the test.
			p = n.Start(t, slices.Concat(harness.Frequent, []string{"--nvml-call-limit=45s"})...)
			beside := n.Allocate(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)})
			fault.UntilStruck(t, p)
			p.MustPrepare(t, beside)
			p.MustUnprepare(t, beside)
			p.Kill()

			p = n.Run(t, impatient...)
			p.UntilTainted(t, n, "unresponsive", devices)
			p.UntilPublished(t, n, 0, 1)
			p.MustUnprepare(t, stuck)
			fault.Remove(t)
			p.UntilTainted(t, n, "unresponsive", nil)
			p.UntilClean(t, n)
		})
	}
}

// TestHangWhileStopping checks that a driver stops although a call hangs, and that the next
// one finishes its work.
func TestHangWhileStopping(t *testing.T) {
	t.Parallel()
	h := newHang(t, "nvmlDeviceCreateGpuInstanceWithPlacement", harness.Prepare)
	if _, err := h.p.TryPrepare(t.Context(), h.stuck, harness.KubeletTimeout); err == nil {
		t.Fatal("prepared although a call hangs")
	}
	h.p.Stop(t)
	h.fault.Remove(t)
	next := h.n.Start(t, impatient...)
	next.Ready(t)
	next.MustUnprepare(t, h.stuck, h.earlier)
	next.UntilClean(t, h.n)
}

// TestAllAtOnce prepares the smallest partitions of all GPUs of a machine by concurrent
// calls, and unprepares them in the same way.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	const gpus, each = 8, 7
	n, p := harness.NewDriver(t, "dgx-h100")
	var claims []*drapb.Claim
	for start := range each {
		for gpu := range gpus {
			claims = append(claims, n.Allocate(t, []harness.Device{harness.Partition(gpu, "1g.10gb", start)}))
		}
	}
	all := func(call func(context.Context, int) error) {
		t.Helper()
		errs := make([]error, len(claims))
		var wg sync.WaitGroup
		for i := range claims {
			wg.Go(func() {
				if err := call(t.Context(), i); err != nil {
					errs[i] = fmt.Errorf("claim %d: %w", i, err)
				}
			})
		}
		wg.Wait()
		must.Do(t, errors.Join(errs...))
	}
	all(func(ctx context.Context, i int) error {
		ids, err := p.TryPrepare(ctx, claims[i], harness.KubeletTimeout)
		if err != nil {
			return err
		}
		return n.CheckPrepared(claims[i].GetUid(), ids, i%gpus, harness.Place{Profile: "1g.10gb", Start: i / gpus})
	})
	expect.Equal(t, len(n.Instances(t)), gpus*each, "instances are live")
	all(func(ctx context.Context, i int) error { return p.TryUnprepare(ctx, claims[i], harness.KubeletTimeout) })
	p.UntilClean(t, n) // on a busy machine some are released after the answer
	for gpu, on := range n.MIGMode(t) {
		if on {
			t.Errorf("GPU %d is in MIG mode although nothing is left", gpu)
		}
	}
}

// TestHangWhileReading checks that a GPU whose health cannot be read because a call hangs keeps
// back nothing of another: an XID there is a taint at once.
func TestHangWhileReading(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", impatient...)
	p.UntilPublished(t, n, 0, 1)
	fault := n.Inject(t, machine.Fault{Function: "nvmlDeviceGetTotalEccErrors", GPU: 0, Hang: true, Effect: machine.Proceed})
	fault.UntilStruck(t, p)
	p.UntilTainted(t, n, "unresponsive", n.DevicesOf(t, 0))
	p.Until(t, "the taint of an XID", func(context.Context) error {
		n.SendXID(t, 1, 48, -1)
		tainted := false
		n.API.EachDevice(func(d *resourceapi.Device) {
			tainted = tainted || slices.ContainsFunc(d.Taints, func(taint resourceapi.DeviceTaint) bool { return taint.Value == "48" })
		})
		if !tainted {
			return errors.New("there is none")
		}
		return nil
	})
	fault.Remove(t)
	p.UntilTainted(t, n, "unresponsive", nil)
	p.UntilTainted(t, n, "xid", nil)
}
