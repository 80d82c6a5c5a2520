// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"maps"
	"slices"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// patient makes the driver wait for calls as long as it ever does.
const patient = "--nvml-call-limit=45s"

// TestSlowGPUHoldsUpNobody checks that claims of a GPU come and go as ever while the driver is at work on another one that is
// slow, although it looks at all of them all the time.
func TestSlowGPUHoldsUpNobody(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, append(harness.Frequent, patient)...)
	p.Ready(t)
	onSlow := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, onSlow)
	gate := n.Hold(t, "nvmlGpuInstanceDestroy", 0)
	released := make(chan error, 1)
	go func() { released <- p.TryUnprepare(t.Context(), onSlow, harness.KubeletTimeout) }()
	gate.UntilHeld(t, 1)

	for start := range 7 {
		c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", start)}))
		p.MustPrepare(t, c)
		p.MustUnprepare(t, c)
	}
	if err := gate.CheckHeld(1); err != nil {
		t.Errorf("GPU 0 was not slow all the time: %v", err)
	}
	gate.Remove(t)
	if err := <-released; err != nil {
		t.Errorf("the release on the slow GPU: %v", err)
	}
}

// TestReleaseOnSlowGPU checks that a release is answered in time, however long a call on its GPU takes, so that the pod can
// end, and that the rest is done when the call has returned.
func TestReleaseOnSlowGPU(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, append(harness.Frequent, patient)...)
	p.Ready(t)
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4), harness.Partition(1, "1g.10gb", 4)}))
	p.MustPrepare(t, c)
	gate := n.Hold(t, "nvmlGpuInstanceDestroy", 0)
	if err := p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout); err != nil {
		t.Errorf("GPU 0 is slow, and the pod with it cannot end: %v", err)
	}
	n.WantInstances(t, 1)
	gate.Remove(t)
	p.UntilClean(t, n)
}

// TestReleaseOfUnkillableMPS checks that a release is answered in time where the daemon of a session cannot be killed, as one whose server hangs in a
// call of the kernel module.
func TestReleaseOfUnkillableMPS(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t)
	p.Ready(t)
	c := n.Allocate(t, []harness.Device{{Kind: harness.MPS}})
	ids := p.MustPrepare(t, c)
	n.StartProgram(t, ids...).Kill() // there is a server from now on
	running, err := n.MPSProcesses()
	if err != nil || len(running) == 0 {
		t.Fatalf("processes of MPS: %v, %v", running, err)
	}
	thaw := harness.Freeze(t, slices.Collect(maps.Keys(running))...)
	if err := p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout); err != nil {
		t.Errorf("MPS cannot be killed, and the pod cannot end: %v", err)
	}
	thaw()
	p.UntilClean(t, n)
}
