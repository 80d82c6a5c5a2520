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
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// untilNamed waits for an event that says a text.
func untilNamed(t *testing.T, n *harness.Node, p *harness.Driver, text string) {
	t.Helper()
	p.Until(t, "an event that names the process", func(context.Context) error {
		for _, e := range n.Events(t) {
			if strings.Contains(e.Message, text) {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// TestPartitionHeldByContainer checks that a partition stays as long as a process of a
// container has it open, whether the driver lists the process or not, and that log and
// event say which process that is.
func TestPartitionHeldByContainer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args   []string
		listed bool
		// gpu is one whose nodes have names that programs of other tests hardly use.
		gpu int
	}{
		"program": {args: []string{"hold", "--memory=1Gi"}, listed: true, gpu: 6},
		"watcher": {args: []string{"watch"}, gpu: 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewDriver(t, "dgx-h100")
			at := harness.Place{Profile: "1g.10gb", Start: 4}
			claim, ids := p.NewClaim(t, n, harness.Partition(test.gpu, at.Profile, at.Start))
			holder := must.Get(n.StartReady(t.Context(), t, n.Container(t, ids...), test.args...))(t)
			m := n.Machine(t)
			g := m.GPUs[test.gpu]
			in := at.Find(&g)
			if !slices.ContainsFunc(m.Processes, func(p machine.Process) bool { return p.PID == holder.PID() && p.InstanceID == in.ID }) {
				t.Errorf("process %d does not hold GPU instance %d: %+v", holder.PID(), in.ID, m.Processes)
			}
			if out := n.RunSMI(t, fmt.Sprintf("-i %d -q", test.gpu)); strings.Contains(out, fmt.Sprintf(": %d\n", holder.PID())) != test.listed {
				t.Errorf("nvidia-smi: listed %t, want %t:\n%s", !test.listed, test.listed, out)
			}

			for _, verb := range []string{"-dci", "-dgi"} {
				args := fmt.Sprintf("mig -i %d %s -gi %d", test.gpu, verb, in.ID)
				if out, err := n.TrySMI(t.Context(), args); err == nil || !strings.Contains(out, "In use") {
					t.Errorf("nvidia-smi %s: %v: %s", args, err, out)
				}
			}

			// The pod ends as far as the kubelet is concerned.
			p.MustUnprepare(t, claim)
			n.WantInstances(t, test.gpu, at)
			held := fmt.Sprintf("process %d (cuda-client, has /dev/nvidia-caps/nvidia-cap%d and ", holder.PID(), 3+135*g.Minor+9*in.ID)
			p.WantLog(t, held)
			p.UntilTainted(t, n, "release-pending", n.Overlapping(t, test.gpu, at.Start, 1))
			untilNamed(t, n, p, held)
			holder.Stop()
			p.UntilClean(t, n)
			p.UntilTainted(t, n, "release-pending", nil)
		})
	}
}

// TestMemoryLeftBehind checks that a GPU whose claim is released is not given out while a process that no record knows has
// memory on it, or a process in a pod without a claim its node open; that this is said, and that the GPU is free again when
// the process has ended. The pod may have got the device nodes from another one. It is not parallel: its process has nodes open
// that the GPUs of other machines have, too.
func TestMemoryLeftBehind(t *testing.T) {
	for kind, test := range map[string]struct {
		device harness.Device
		args   []string
	}{
		"whole":      {harness.Device{}, []string{"hold", "--memory=1Gi"}},
		"time slice": {harness.Device{Kind: harness.TimeSlice}, []string{"hold", "--memory=1Gi"}},
		"open node":  {harness.Device{}, []string{"watch"}},
	} {
		t.Run(kind, func(t *testing.T) {
			n, p := harness.NewDriver(t, "h100x1", harness.Frequent...)
			c, ids := p.NewClaim(t, n, test.device)
			program := must.Get(n.StartReady(t.Context(), t, n.Container(t, ids...), test.args...))(t)
			program.InPod(t, uuid.NewUUID())
			p.MustUnprepare(t, c)
			p.WantTaken(t, n, "a process of another pod has the GPU", harness.Device{}, harness.Device{Kind: harness.TimeSlice})
			p.UntilTainted(t, n, "release-pending", n.DevicesOf(t, 0))
			untilNamed(t, n, p, fmt.Sprintf("process %d ", program.PID()))
			program.Stop()
			p.UntilTainted(t, n, "release-pending", nil)
			p.WantFree(t, n, harness.Device{})
		})
	}
}

// onHost starts a program outside containers, as a display server, a monitoring agent or a notebook of an administrator.
func onHost(t *testing.T, n *harness.Node, p *harness.Driver, args ...string) (pid int, end func()) {
	t.Helper()
	program := exec.CommandContext(t.Context(), harness.Built.Client, args...)
	program.Env = []string{"GPUSIM_STATE=" + sysroot.StatePath(n.Root)}
	out := &harness.LogBuffer{}
	program.Stdout, program.Stderr = out, out
	must.Do(t, program.Start())
	end = func() {
		_ = program.Process.Kill()
		_ = program.Wait()
	}
	t.Cleanup(end)
	p.UntilTrue(t, "the process", func() bool { return strings.Contains(out.String(), "ready\n") })
	return program.Process.Pid, end
}

// TestMIGModeHeld checks that a program outside pods that has all GPUs open and does not use them, as monitoring agents do,
// keeps neither the MIG mode from changing nor partitions from being made and destroyed, and no GPU from being given out.
// It is not parallel: no pod of another test may have a node of the GPU open.
func TestMIGModeHeld(t *testing.T) {
	n, p := harness.NewDriver(t, "h100x1", harness.Frequent...)
	onHost(t, n, p, "watch")
	p.WantFree(t, n, harness.Partition(0, "1g.10gb", 4), harness.Device{}, harness.Device{Kind: harness.TimeSlice}, harness.Device{})
	n.WantClean(t)
	if n.MIGMode(t)[0] {
		t.Error("MIG mode is on although nothing is left")
	}
	p.UntilTainted(t, n, "release-pending", nil)
}

// TestFirstInstanceInUse checks that a pod whose partition, or MPS session, cannot be made because a process outside pods has
// memory on the GPU is told which process is in the way, that no other pod is sent to the device meanwhile, and that all is
// well when the process is gone.
func TestFirstInstanceInUse(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ wanted, alike harness.Device }{
		"partition": {harness.Partition(0, "1g.10gb", 4), harness.Partition(0, "1g.10gb", 5)},
		"session":   {harness.Device{Kind: harness.MPS}, harness.Device{Kind: harness.MPS}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewMPSDriver(t, "h100x1", harness.Frequent...)
			pid, end := onHost(t, n, p, "hold", "--memory=1Gi", "--device=0")
			c := n.Allocate(t, []harness.Device{test.wanted})
			expect.Do(t, harness.Eventually(t.Context(), func() error { // on a busy machine the first call may end before that is known
				_, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout)
				if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", pid)) {
					return fmt.Errorf("want an error that says that process %d is in the way, got: %w", pid, err)
				}
				return nil
			}))
			tainted := func() bool {
				return slices.ContainsFunc(n.Published()[test.alike.Name(n.Address(t, 0))].Taints, func(taint resourceapi.DeviceTaint) bool {
					return taint.Effect != resourceapi.DeviceTaintEffectNone
				})
			}
			p.UntilTrue(t, "a taint of the device", tainted)
			end()
			p.MustPrepare(t, c)
			p.MustUnprepare(t, c)
			p.UntilTrue(t, "the device to be offered again", func() bool { return !tainted() })
		})
	}
}

// TestMinorMoves checks that claims get the device nodes that their GPU has after its MIG
// mode has changed, on a machine where the minor changes with it.
func TestMinorMoves(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) { m.MovingMinors = true })
	p := n.Run(t)
	partition := harness.Partition(0, "1g.10gb", 4)
	// It is turned off in between.
	for _, want := range []struct {
		minor  int
		device harness.Device
	}{{0, harness.Device{}}, {2, partition}, {0, harness.Device{}}, {2, partition}} {
		claim, ids := p.NewClaim(t, n, want.device)
		expect.Equal(t, n.Machine(t).GPUs[0].Minor, want.minor, want, "the GPU's minor")
		n.WantDevice(t, claim, ids[0], want.device)
		if out, err := n.RunProgram(t, n.Container(t, ids...), "info"); err != nil {
			t.Errorf("%+v: %v: %s", want, err, out)
		}
		p.MustUnprepare(t, claim)
	}
	n.WantClean(t)
}
