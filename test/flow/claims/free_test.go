// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// leftBehind is a program in a pod that has GPU 0 when its claim is released: the pod may have got the device nodes from
// another one, and does not end.
func leftBehind(t *testing.T, device harness.Device, args ...string) (n *harness.Node, p *harness.Driver, program *harness.Program) {
	t.Helper()
	n = harness.NewNode(t, "h100x1")
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	c := n.Allocate(t, []harness.Device{device})
	program, err := n.StartReady(t.Context(), t, n.Container(t, p.MustPrepare(t, c)...), args...)
	if err != nil {
		t.Fatal(err)
	}
	program.InPod(t, uuid.NewUUID())
	p.MustUnprepare(t, c)
	return n, p, program
}

// wantHeldBack checks that a GPU is not given out as long as a program has it, and who that is can be read.
func wantHeldBack(t *testing.T, n *harness.Node, p *harness.Driver, program *harness.Program, why string) {
	t.Helper()
	for _, d := range []harness.Device{{}, {Kind: harness.TimeSlice}} {
		next := n.Allocate(t, []harness.Device{d})
		if _, err := p.TryPrepare(t.Context(), next, harness.RefusalTimeout); err == nil {
			t.Fatalf("%s is given out while process %d of another pod %s", d.Name(n.Address(t, 0)), program.PID(), why)
		}
		p.MustUnprepare(t, next)
	}
	p.UntilTainted(t, n, "release-pending", n.DevicesOf(t, 0))
	p.Until(t, "an event that names the process", func(context.Context) error {
		for _, e := range n.Events(t) {
			if strings.Contains(e.Message, fmt.Sprintf("process %d ", program.PID())) {
				return nil
			}
		}
		return errors.New("there is none")
	})
	program.Stop()
	p.UntilTainted(t, n, "release-pending", nil)
	next := n.Allocate(t, []harness.Device{{}})
	p.MustPrepare(t, next)
	p.MustUnprepare(t, next)
}

// TestMemoryLeftBehind checks that a GPU whose claim is released is not given out while a process that no record knows has
// memory on it, that this is said, and that the GPU is free again when the process has ended.
func TestMemoryLeftBehind(t *testing.T) {
	for kind, device := range map[string]harness.Device{"whole": {}, "time slice": {Kind: harness.TimeSlice}} {
		t.Run(kind, func(t *testing.T) {
			n, p, program := leftBehind(t, device, "hold", "--memory=1Gi")
			wantHeldBack(t, n, p, program, "has memory on it")
		})
	}
}

// TestNodeLeftOpen checks the same of a process in a pod without a claim that has no more than the device node open.
func TestNodeLeftOpen(t *testing.T) {
	n, p, program := leftBehind(t, harness.Device{}, "watch")
	wantHeldBack(t, n, p, program, "has its node open")
}

// TestMonitorKeepsNothingBack checks that a process outside pods that has all GPUs open, as the daemons of a monitoring stack
// on the host, is no reason to keep a GPU back.
func TestMonitorKeepsNothingBack(t *testing.T) {
	n := harness.NewNode(t, "l4x1")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	agent := exec.CommandContext(t.Context(), harness.Built.Client, "watch")
	agent.Env = []string{"GPUSIM_STATE=" + sysroot.StatePath(n.Root)}
	out := &harness.LogBuffer{}
	agent.Stdout, agent.Stderr = out, out
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	})
	p.Until(t, "the agent", func(context.Context) error {
		if got := out.String(); got != "ready\n" {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	for _, d := range []harness.Device{{}, {Kind: harness.TimeSlice}, {}} {
		c := n.Allocate(t, []harness.Device{d})
		p.MustPrepare(t, c)
		p.MustUnprepare(t, c)
	}
	p.UntilTainted(t, n, "release-pending", nil)
}

// TestOtherDevicesWhileInUse checks that a claim that was allocated another GPU, and is prepared again, does not set its
// first one free while processes have memory on it.
func TestOtherDevicesWhileInUse(t *testing.T) {
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	p.Ready(t)
	c := n.Allocate(t, []harness.Device{{GPU: 0}})
	program := n.StartProgram(t, p.MustPrepare(t, c)...)
	program.InPod(t, uuid.NewUUID())
	n.Reallocate(c, []resourceapi.DeviceRequestAllocationResult{{Device: n.DeviceName(t, 1, "", 0)}})
	_, _ = p.TryPrepare(t.Context(), c, 2*harness.ShortTimeout)
	next := n.Allocate(t, []harness.Device{{GPU: 0}})
	if _, err := p.TryPrepare(t.Context(), next, harness.RefusalTimeout); err == nil {
		t.Errorf("GPU 0 is given out while process %d of another claim has memory on it", program.PID())
	}
}
