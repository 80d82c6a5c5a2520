// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// impatient makes the driver leave a call behind soon. A call that is only slow may
// then be taken for one that hangs: the tests repeat what was refused for that.
var impatient = slices.Concat(frequent, []string{"--nvml-call-limit=2s"})

// TestHang: a call on one GPU does not return. The GPU is reported and tainted,
// all others go on, pods on it can end, and when the call returns at last all is
// as if nothing had been.
func TestHang(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		// hangs is the operation that the call belongs to.
		hangs operation
	}{
		"look":                    {"nvmlDeviceGetMigMode", prepare},
		"create":                  {"nvmlDeviceCreateGpuInstanceWithPlacement", prepare},
		"create compute instance": {"nvmlGpuInstanceCreateComputeInstance", prepare},
		"destroy":                 {"nvmlGpuInstanceDestroy", unprepare},
		"look before destroying":  {"nvmlDeviceGetGpuInstances", unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newHang(t, test.function, test.hangs).run(t)
		})
	}
}

// hang is a driver with one call on GPU 0 that does not return.
type hang struct {
	n     *node
	p     *process
	fault *injected
	// earlier was prepared before, stuck is the claim whose call hangs.
	earlier, stuck *drapb.Claim
	operation      operation
	function       string
}

func newHang(t *testing.T, function string, o operation) *hang {
	t.Helper()
	h := &hang{n: newNode(t, "h100x3"), operation: o, function: function}
	h.p = h.n.start(t, impatient...)
	h.p.ready(t)
	h.earlier = h.n.allocate(h.n.names(t, []request{mig(0, "1g.10gb", 0)}))
	h.p.mustPrepare(t, h.earlier)
	h.stuck = h.n.allocate(h.n.names(t, []request{mig(0, "1g.10gb", 4)}))
	if o == unprepare {
		h.p.mustPrepare(t, h.stuck)
	}
	// What is in the way takes effect when it is let go.
	h.fault = h.n.inject(t, machine.Fault{Function: function, GPU: 0, Hang: true, Effect: machine.Proceed})
	return h
}

func (h *hang) run(t *testing.T) {
	answer := h.begin(t)
	h.othersWork(t)
	h.checkAnswer(t, <-answer)
	h.othersWork(t)

	third := h.n.allocate(h.n.names(t, []request{mig(0, "1g.10gb", 6)}))
	h.checkNamed(t, h.p.prepare(t, third)[0].GetError())
	h.p.untilTainted(t, h.n, "unresponsive", h.n.devicesOf(t, 0))
	h.p.untilEvent(t, h.n, "GPUUnresponsive", h.n.address(t, 0))

	// Pods can end, and it is not forgotten that something is to be done.
	h.p.mustUnprepare(t, h.earlier, h.stuck, third)
	if left := h.n.cdiSpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	if r, err := h.n.record(h.earlier.GetUid()); err != nil || r == nil || r.State != "unpreparing" {
		t.Errorf("the journal says %+v of a claim whose partition could not be removed (%v)", r, err)
	}
	h.othersWork(t)

	h.fault.remove(t)
	h.p.untilClean(t, h.n)
	h.p.untilTainted(t, h.n, "unresponsive", nil)
	again := h.n.allocate(h.n.names(t, []request{mig(0, "1g.10gb", 4)}))
	ids := h.p.mustPrepare(t, again)
	if err := h.n.checkPrepared(again.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
		t.Error(err)
	}
	h.p.mustUnprepare(t, again)
	h.p.untilClean(t, h.n)
	if on := h.n.migMode(t)[0]; on {
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
			_, err := h.p.try(t.Context(), h.operation, h.stuck, kubeletTime)
			answer <- err
		}()
		var early error
		h.p.until(t, "a call that hangs", func(context.Context) error {
			select {
			case early = <-answer:
				return nil
			default:
			}
			return h.fault.tryHasStruck()
		})
		if early == nil || !leftBehind(early) || strings.Contains(early.Error(), h.function) {
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
		whole := h.n.allocate(h.n.names(t, []request{{gpu: gpu}}))
		h.p.mustPrepare(t, whole)
		h.p.mustUnprepare(t, whole)
		part := h.n.allocate(h.n.names(t, []request{mig(gpu, "2g.20gb", 2)}))
		h.p.mustPrepare(t, part)
		h.p.mustUnprepare(t, part)
	}
}

// checkAnswer: a Prepare fails and says why; an Unprepare succeeds, so that the
// pod can end.
func (h *hang) checkAnswer(t *testing.T, err error) {
	t.Helper()
	switch {
	case h.operation == unprepare && err != nil:
		t.Errorf("unprepare with a call that hangs: %v", err)
	case h.operation == prepare && err == nil:
		t.Error("prepared although a call hangs")
	case h.operation == prepare:
		h.checkNamed(t, err.Error())
	}
}

// checkNamed: the error says which call is out and on which GPU.
func (h *hang) checkNamed(t *testing.T, got string) {
	t.Helper()
	for _, want := range []string{h.function, h.n.address(t, 0), "has not returned"} {
		if !strings.Contains(got, want) {
			t.Errorf("the error lacks %q: %s", want, got)
		}
	}
}

// TestHangAtStart: the driver's start does not wait for what does not answer.
func TestHangAtStart(t *testing.T) {
	t.Parallel()
	t.Run("library", func(t *testing.T) {
		t.Parallel()
		n := newNode(t, "h100x2")
		fault := n.inject(t, machine.Fault{Function: "nvmlInitWithFlags", GPU: -1, Hang: true, Effect: machine.Proceed})
		p := n.start(t, impatient...)
		fault.struck(t, p)
		p.until(t, "liveness", p.check("liveness"))
		claim := n.allocate(n.names(t, []request{{gpu: 1}}))
		if got := p.prepare(t, claim)[0].GetError(); !strings.Contains(got, "nvmlInitWithFlags") {
			t.Errorf("the error does not name the call that hangs: %q", got)
		}
		p.mustUnprepare(t, claim)
		if err := p.check("readiness")(t.Context()); err == nil {
			t.Error("ready without an NVML session")
		}
		fault.remove(t)
		p.ready(t)
		p.untilPublished(t, n, 0, 1)
		p.mustPrepare(t, claim)
		p.mustUnprepare(t, claim)
		n.wantClean(t)
	})
	t.Run("GPU", func(t *testing.T) {
		t.Parallel()
		n := newNode(t, "h100x3")
		fault := n.inject(t, machine.Fault{Function: "nvmlDeviceGetUUID", GPU: 1, Hang: true, Effect: machine.Proceed})
		p := n.start(t, impatient...)
		p.ready(t)
		p.untilPublished(t, n, 0, 2)
		for _, gpu := range []int{0, 2} {
			claim := n.allocate(n.names(t, []request{mig(gpu, "1g.10gb", 4)}))
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
		}
		p.untilEvent(t, n, "GPUUnresponsive", n.address(t, 1))
		fault.remove(t)
		p.untilPublished(t, n, 0, 1, 2)
		claim := n.allocate(n.names(t, []request{mig(1, "1g.10gb", 4)}))
		p.mustPrepare(t, claim)
		p.mustUnprepare(t, claim)
		n.wantClean(t)
	})
}

// TestHangWhileStopping: a driver that is told to stop does not wait for ever,
// and the next one finishes.
func TestHangWhileStopping(t *testing.T) {
	t.Parallel()
	h := newHang(t, "nvmlDeviceCreateGpuInstanceWithPlacement", prepare)
	if _, err := h.p.tryPrepare(t.Context(), h.stuck, kubeletTime); err == nil {
		t.Fatal("prepared although a call hangs")
	}
	h.p.stop(t)
	h.fault.remove(t)
	next := h.n.start(t, impatient...)
	next.ready(t)
	next.mustUnprepare(t, h.stuck, h.earlier)
	next.untilClean(t, h.n)
}

// TestAllAtOnce: the smallest partitions of all GPUs of a machine are prepared by
// calls that come at the same time, and so they are unprepared.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	const gpus, each = 8, 7
	n := newNode(t, "dgx-h100")
	p := n.start(t)
	p.ready(t)
	var claims []*drapb.Claim
	for start := range each {
		for gpu := range gpus {
			claims = append(claims, n.allocate(n.names(t, []request{mig(gpu, "1g.10gb", start)})))
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
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	all(func(ctx context.Context, i int) error {
		ids, err := p.tryPrepare(ctx, claims[i], kubeletTime)
		if err != nil {
			return err
		}
		return n.checkPrepared(claims[i].GetUid(), ids, i%gpus, place{"1g.10gb", i / gpus})
	})
	if live := n.instances(t); len(live) != gpus*each {
		t.Errorf("%d instances are live, want %d", len(live), gpus*each)
	}
	all(func(ctx context.Context, i int) error { return p.tryUnprepare(ctx, claims[i], kubeletTime) })
	n.wantClean(t)
	for gpu, on := range n.migMode(t) {
		if on {
			t.Errorf("GPU %d is in MIG mode although nothing is left", gpu)
		}
	}
}
