// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// inUse makes the creation of instances on GPU 0 fail, as that of the first one does on Hopper and later while somebody has
// memory or a channel there.
func inUse(t *testing.T, n *harness.Node) *harness.Fault {
	t.Helper()
	return n.Inject(t, machine.Fault{Function: "nvmlDeviceCreateGpuInstanceWithPlacement", GPU: 0, Code: harness.NVMLInUse})
}

// TestFirstInstanceKeepsMode checks that MIG mode stays on while it is tried to make the first instance of a GPU that is in
// use: a change of the mode takes seconds and moves device numbers, and does not help.
func TestFirstInstanceKeepsMode(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	p.Ready(t)
	instances := inUse(t, n)
	modes := n.Inject(t, machine.Fault{Function: "nvmlDeviceSetMigMode", GPU: 0, Effect: machine.Proceed})
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	if _, err := p.TryPrepare(t.Context(), c, harness.RefusalTimeout); err == nil {
		t.Fatal("prepared although no instance can be made")
	}
	tries, err := instances.TryRemove()
	if err != nil || tries < 2 {
		t.Fatalf("the creation was tried %d times: %v", tries, err)
	}
	// On, and off when the call has given up.
	if changes, err := modes.TryRemove(); err != nil || changes > 2 {
		t.Errorf("MIG mode was changed %d times while it was tried to make one instance: %v", changes, err)
	}
	p.MustPrepare(t, c)
	p.MustUnprepare(t, c)
	n.WantClean(t)
}

// TestFirstInstanceInUse checks that a pod whose partition cannot be made is told which process is in the way, that no other
// pod is sent to the GPU meanwhile, and that all is well when the process is gone.
func TestFirstInstanceInUse(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	pid, end := holdMemory(t, n, p)
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	failed := p.Prepare(t, c)[0].GetError()
	if !strings.Contains(failed, fmt.Sprintf("process %d", pid)) {
		t.Errorf("the error does not say that process %d is in the way: %s", pid, failed)
	}
	name := n.DeviceName(t, 0, "1g.10gb", 5)
	if err := untilKeptFree(t, n, name); err != nil {
		t.Errorf("no partition of the GPU can be made, and more pods are sent to it: %v", err)
	}
	end()
	p.MustPrepare(t, c)
	p.MustUnprepare(t, c)
	p.Until(t, "the device to be offered again", func(context.Context) error {
		if d := n.Published()[name]; len(d.Taints) > 0 {
			return fmt.Errorf("it has the taints %v", d.Taints)
		}
		return nil
	})
}

// TestSessionInUse checks the same of a GPU on which no MPS session can be started.
func TestSessionInUse(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	pid, end := holdMemory(t, n, p)
	c := n.Allocate(t, []harness.Device{{Kind: harness.MPS}})
	_, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout)
	if err == nil {
		t.Fatalf("a session was started beside process %d", pid)
	}
	if !strings.Contains(err.Error(), fmt.Sprintf("process %d", pid)) {
		t.Errorf("the error does not say that process %d is in the way: %v", pid, err)
	}
	if err := untilKeptFree(t, n, n.DeviceName(t, 0, "", 0)+"-"+string(harness.MPS)); err != nil {
		t.Errorf("no session can be started on the GPU, and more pods are sent to it: %v", err)
	}
	end()
	p.MustPrepare(t, c)
	p.MustUnprepare(t, c)
}

// holdMemory starts a process outside containers that has memory on GPU 0, as a display server or a notebook of an administrator.
func holdMemory(t *testing.T, n *harness.Node, p *harness.Driver) (pid int, end func()) {
	t.Helper()
	holder := exec.CommandContext(t.Context(), harness.Built.Client, "hold", "--memory=1Gi", "--device=0")
	holder.Env = []string{"GPUSIM_STATE=" + sysroot.StatePath(n.Root)}
	out := &harness.LogBuffer{}
	holder.Stdout, holder.Stderr = out, out
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	end = func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	}
	t.Cleanup(end)
	p.Until(t, "the process", func(context.Context) error {
		if got := out.String(); !strings.Contains(got, "ready\n") {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	return holder.Process.Pid, end
}

// untilKeptFree waits until no pod is sent to a device.
func untilKeptFree(t *testing.T, n *harness.Node, name string) error {
	t.Helper()
	return harness.Eventually(t.Context(), func() error {
		d, found := n.Published()[name]
		for _, taint := range d.Taints {
			if taint.Effect != resourceapi.DeviceTaintEffectNone {
				return nil
			}
		}
		return fmt.Errorf("%s is published (%t) without a taint", name, found)
	})
}
