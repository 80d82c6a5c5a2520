// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// TestGSPHangs checks that a GPU whose GSP hangs, which has all GPUs locked meanwhile, is tainted as unresponsive, and that
// those are not whose calls only wait behind its call.
func TestGSPHangs(t *testing.T) {
	t.Parallel()
	// Nothing calls GPU 1 at the same moment, when it could not be told which of the two calls has the locks.
	const poll = 10 * time.Second
	h := &hang{n: harness.NewNode(t, "h100x2"), operation: harness.Prepare, function: "nvmlDeviceCreateGpuInstanceWithPlacement"}
	h.p = h.n.Start(t, slices.Concat(harness.Quiet, []string{"--nvml-call-limit=10s", "--poll-interval=" + poll.String()})...)
	n, p := h.n, h.p
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1)
	h.stuck = n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)})
	h.fault = n.Inject(t, machine.Fault{Function: h.function, GPU: 0, Hang: true, AllGPUs: true, Effect: machine.Proceed})
	betweenPolls(t, h)
	h.begin(t)
	p.Until(t, "a call on GPU 1 that waits behind one on GPU 0", func(context.Context) error {
		behind, err := n.State.Behind()
		if err == nil && !slices.ContainsFunc(behind, func(c state.Held) bool { return slices.Contains(c.GPUs, 1) }) {
			err = fmt.Errorf("behind it are %+v", behind)
		}
		return err
	})
	unresponsive := func(gpu int) bool {
		name, found := n.DeviceName(t, gpu, "", 0), false
		n.API.EachDevice(func(d *resourceapi.Device) {
			found = found || d.Name == name && slices.ContainsFunc(d.Taints, func(taint resourceapi.DeviceTaint) bool {
				return taint.Key == harness.DriverName+"/unresponsive"
			})
		})
		return found
	}
	p.UntilTrue(t, "the taint of GPU 0", func() bool { return unresponsive(0) })
	// Both calls are older than the limit after this.
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if unresponsive(1) {
			t.Error("GPU 1 is called unresponsive, whose calls only wait behind one of GPU 0")
			break
		}
	}
	h.fault.Remove(t)
	p.UntilTainted(t, n, "unresponsive", nil)
}

// betweenPolls waits until the driver has looked at its GPUs, and has done so.
func betweenPolls(t *testing.T, h *hang) {
	t.Helper()
	first, last, since := uint64(0), uint64(0), time.Now()
	h.p.Until(t, "a moment after an observation of the GPUs", func(context.Context) error {
		counts, err := h.n.State.Calls()
		if err != nil {
			return err
		}
		var all uint64
		for _, count := range counts {
			all += count
		}
		if all != last {
			last, since = all, time.Now()
		}
		if first == 0 {
			first = all
		}
		if last == first || time.Since(since) < 300*time.Millisecond {
			return fmt.Errorf("%d calls when it began, %d now, the last one before %s", first, last, time.Since(since))
		}
		return nil
	})
}
