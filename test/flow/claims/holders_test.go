// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// TestPartitionHeldByContainer checks that a partition stays as long as a process of a
// container has it open, whether the driver lists the process or not, and that log and
// event say which process that is.
func TestPartitionHeldByContainer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args   []string
		listed bool
		// gpu is one whose nodes have names that other tests on this machine hardly use.
		gpu int
	}{
		"program": {args: []string{"hold", "--memory=1Gi"}, listed: true, gpu: 6},
		"watcher": {args: []string{"watch"}, gpu: 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "dgx-h100")
			p := n.Start(t)
			p.Ready(t)
			at := harness.Place{Profile: "1g.10gb", Start: 4}
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(test.gpu, at.Profile, at.Start)}))
			holder, err := n.StartReady(t.Context(), t, n.Container(t, p.MustPrepare(t, claim)...), test.args...)
			if err != nil {
				t.Fatal(err)
			}
			g := n.Machine(t).GPUs[test.gpu]
			in := at.Find(&g)
			checkHolder(t, n, test.gpu, holder.PID(), in.ID, test.listed)
			for _, verb := range []string{"-dci", "-dgi"} {
				args := fmt.Sprintf("mig -i %d %s -gi %d", test.gpu, verb, in.ID)
				if out, err := n.TrySMI(t.Context(), args); err == nil || !strings.Contains(out, "In use") {
					t.Errorf("nvidia-smi %s: %v: %s", args, err, out)
				}
			}

			// The pod ends as far as the kubelet is concerned.
			p.MustUnprepare(t, claim)
			n.WantInstances(t, test.gpu, at)
			node := fmt.Sprintf("has /dev/nvidia-caps/nvidia-cap%d and ", 3+135*g.Minor+9*in.ID)
			held := fmt.Sprintf("process %d (cuda-client, %s", holder.PID(), node)
			p.WantLog(t, held)
			p.UntilTainted(t, n, "release-pending", n.Overlapping(t, test.gpu, at.Start, 1))
			p.Until(t, "an event that names the process", func(context.Context) error {
				for _, e := range n.Events(t) {
					if strings.Contains(e.Message, held) {
						return nil
					}
				}
				return errors.New("there is none")
			})
			holder.Stop()
			p.Until(t, "the partition to go", func(context.Context) error {
				if left := n.Instances(t); len(left) > 0 {
					return fmt.Errorf("there is %+v", left)
				}
				return nil
			})
			p.UntilTainted(t, n, "release-pending", nil)
			n.WantClean(t)
		})
	}
}

// checkHolder checks what the machine and NVML's list know of a process in a container.
func checkHolder(t *testing.T, n *harness.Node, gpu, pid, instance int, listed bool) {
	t.Helper()
	at := slices.IndexFunc(n.Machine(t).Processes, func(p machine.Process) bool { return p.PID == pid && p.InstanceID == instance })
	if at < 0 {
		t.Errorf("process %d does not hold GPU instance %d: %+v", pid, instance, n.Machine(t).Processes)
	}
	if out := n.RunSMI(t, fmt.Sprintf("-i %d -q", gpu)); strings.Contains(out, fmt.Sprintf(": %d\n", pid)) != listed {
		t.Errorf("nvidia-smi: listed %t, want %t:\n%s", !listed, listed, out)
	}
}

// TestMIGModeHeld checks that a program that has a GPU open and does not use it, as monitoring agents do, keeps
// neither the MIG mode from changing nor partitions from being made and destroyed.
func TestMIGModeHeld(t *testing.T) {
	t.Parallel()
	// A GPU whose node has a name that other tests on this machine hardly use.
	const gpu = 5
	n := harness.NewNode(t, "dgx-h100")
	p := n.Start(t)
	p.Ready(t)
	agent := exec.CommandContext(t.Context(), harness.Built.Client, "watch", fmt.Sprintf("--device=%d", gpu))
	agent.Env = []string{"GPUSIM_STATE=" + sysroot.StatePath(n.Root)}
	out := &harness.LogBuffer{}
	agent.Stdout, agent.Stderr = out, out
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	p.Until(t, "the agent", func(context.Context) error {
		if got := out.String(); got != "ready\n" {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(gpu, "1g.10gb", 4)}))
	p.MustPrepare(t, claim)
	p.MustUnprepare(t, claim)
	n.WantClean(t)
	if n.MIGMode(t)[gpu] {
		t.Error("MIG mode is on although nothing is left")
	}
	if err := agent.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := agent.Wait(); err != nil {
		t.Errorf("the agent: %v: %s", err, out)
	}
}

// TestMinorMoves checks that claims get the device nodes that their GPU has after its MIG
// mode has changed, on a machine where the minor changes with it.
func TestMinorMoves(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) { m.MovingMinors = true })
	p := n.Start(t)
	p.Ready(t)
	check := func(minor int, device harness.Device, at harness.Place) {
		t.Helper()
		claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{device}))
		ids := p.MustPrepare(t, claim)
		g := n.Machine(t).GPUs[0]
		if g.Minor != minor {
			t.Errorf("%+v: the GPU's minor is %d, want %d", device, g.Minor, minor)
		}
		var in *machine.GPUInstance
		if at.Profile != "" {
			in = at.Find(&g)
		}
		want, err := n.WantNodes(&g, in)
		if err != nil {
			t.Fatal(err)
		}
		got, err := n.SpecNodes(claim.GetUid(), ids[0])
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%+v: device nodes: %v (-want +got):\n%s", device, err, diff)
		}
		if out, err := n.RunProgram(t, n.Container(t, ids...), "info"); err != nil {
			t.Errorf("%+v: %v: %s", device, err, out)
		}
		p.MustUnprepare(t, claim)
	}
	at := harness.Place{Profile: "1g.10gb", Start: 4}
	check(0, harness.Device{GPU: 0}, harness.Place{})
	check(2, harness.Partition(0, at.Profile, at.Start), at)
	// It was turned off in between.
	check(0, harness.Device{GPU: 0}, harness.Place{})
	check(2, harness.Partition(0, at.Profile, at.Start), at)
	n.WantClean(t)
}
