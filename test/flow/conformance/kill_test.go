// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// killed runs the command until a fault strikes, and kills it then. What it has started by
// then goes on, or not.
func killed(t *testing.T, n *harness.Node, f machine.Fault, args ...string) {
	t.Helper()
	during(t, n, f, func(cmd *exec.Cmd) {
		must.Do(t, errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())))
	}, args...)
}

// TestMPSKilled: a run that is killed does not keep the only GPU of a node from the next.
func TestMPSKilled(t *testing.T) {
	t.Parallel()
	for _, function := range []string{"mps_server_start", "mps_client_connect", "mps_client_alloc", "mps_get_client_list", "mps_terminate_client"} {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100-80-sxmx1")
			before := n.Machine(t)
			work := "--work-dir=" + filepath.Join(shortDir(t), "w")
			killed(t, n, machine.Fault{Function: function, GPU: 0, Times: 1}, "--mps", work)
			finished(t, n, "mps.", "--mps", work).wantHolds(t, n.Address(t, 0), "mps.start", "mps.quit")
			expect.Len(t, leftProcesses(t, n.Root), 0, "processes are left")
			untouched(t, n, before)
		})
	}
}

// TestIntrusiveKilled: after a run that is killed, before or after any of its changes, the
// next one puts the GPU back.
func TestIntrusiveKilled(t *testing.T) {
	t.Parallel()
	for _, function := range []string{
		"nvmlDeviceSetComputeMode", "nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement",
		"nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy",
	} {
		for _, effect := range []machine.Effect{machine.KillBefore, machine.KillAfter} {
			for _, skip := range []int{0, 1} {
				t.Run(fmt.Sprintf("%s/%d/%d", function, effect, skip), func(t *testing.T) {
					t.Parallel()
					n := harness.NewNode(t, "h100-80-sxmx1")
					before := n.Machine(t)
					n.Inject(t, machine.Fault{Function: function, GPU: 0, Effect: effect, Times: 1, Skip: skip})
					if _, code, stderr := run(t, n, "--intrusive", "--gpu="+before.GPUs[0].UUID); code != -1 {
						t.Fatalf("it was not killed: exit code %d: %s", code, stderr)
					}
					n.Update(t, func(m *machine.Machine) { m.Faults = nil })
					intrude(t, n, 0).wantHolds(t, n.Address(t, 0), "intrusive.begin", "intrusive.as-before")
					asBefore(t, n, before)
				})
			}
		}
	}
}

// TestIntrusiveKilledWithMPS: the MPS server of a run that was killed keeps its partition
// in use.
func TestIntrusiveKilledWithMPS(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	args := []string{"--intrusive", "--gpu=" + before.GPUs[0].UUID, "--work-dir=" + filepath.Join(shortDir(t), "w")}
	killed(t, n, machine.Fault{Function: "mps_client_alloc", GPU: 0, Times: 1}, args...)
	expect.Len(t, n.Instances(t), 1, "it was killed at another moment")
	finished(t, n, "intrusive.", args...).wantHolds(t, n.Address(t, 0), "intrusive.as-before")
	asBefore(t, n, before)
}

// TestIntrusiveKilledAndUsed: what an earlier run left is not undone while there are claims,
// for it may be theirs by now.
func TestIntrusiveKilledAndUsed(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	n.Inject(t, machine.Fault{Function: "nvmlComputeInstanceDestroy", GPU: 0, Effect: machine.KillBefore, Times: 1})
	args := []string{"--intrusive", "--gpu=" + n.Machine(t).GPUs[0].UUID}
	if _, code, stderr := run(t, n, args...); code != -1 {
		t.Fatalf("it was not killed: exit code %d: %s", code, stderr)
	}
	recordClaim(t, n)
	before := n.Machine(t)
	out, _, _ := run(t, n, args...)
	if got := part(t, out, "intrusive.").Results[0]; !strings.Contains(got.Reason, "1 claims are prepared on this node") {
		t.Errorf("got %+v", got)
	}
	untouched(t, n, before)
}

// TestLive: while the part mps or intrusive uses the GPU, the plugin of the node prepares no claim on it, and
// goes on afterwards.
func TestLive(t *testing.T) {
	t.Parallel()
	for name, checks := range map[string][]string{"mps": {"mps.quit"}, "intrusive": {"intrusive.begin", "intrusive.as-before"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewDriver(t, "h100-80-sxmx1")
			args := []string{"--" + name, "--limit=5m"}
			if name == "intrusive" {
				args = append(args, "--gpu="+n.Machine(t).GPUs[0].UUID)
			}
			claim := n.Allocate(t, []harness.Device{{GPU: 0}})
			out := during(t, n, machine.Fault{Function: "mps_client_alloc", GPU: 0, Times: 1}, func(*exec.Cmd) {
				if ids, err := p.TryPrepare(t.Context(), claim, time.Second); err == nil {
					t.Errorf("a claim was prepared meanwhile: %v", ids)
				}
			}, args...)
			part(t, out, name+".").wantHolds(t, n.Address(t, 0), checks...)
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
		})
	}
}

// TestIntrusiveUnread: a run whose reader goes away ends, and leaves nothing behind.
func TestIntrusiveUnread(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	read, write, err := os.Pipe()
	must.Do(t, err)
	cmd := command(t, n, "--intrusive", "--gpu="+before.GPUs[0].UUID, "--transcript=-")
	cmd.Stdout = write
	err = cmd.Start()
	must.Do(t, errors.Join(err, write.Close(), read.Close()))
	must.Do(t, ignoreExit(cmd.Wait()))
	expect.Equal(t, cmd.ProcessState.ExitCode(), 2, "exit code where the transcript could not be written")
	asBefore(t, n, before)
}

// TestMPSNonsense: no process is killed because a daemon that is wrong calls it its server.
func TestMPSNonsense(t *testing.T) {
	t.Parallel()
	sleep := must.Get(exec.LookPath("sleep"))(t)
	bystander := exec.CommandContext(t.Context(), sleep, "infinity")
	must.Do(t, bystander.Start())
	ended := make(chan error, 1)
	go func() { ended <- bystander.Wait() }()
	n := harness.NewNode(t, "h100-80-sxmx1")
	program := filepath.Join(sysroot.DriverRoot(n.Root), "usr/bin/nvidia-cuda-mps-control")
	script := `#!/bin/sh
if [ "$1" = -f ]; then : > "$CUDA_MPS_PIPE_DIRECTORY/control"; exec ` + sleep + ` infinity; fi
read command
case $command in
get_server_list) echo ` + strconv.Itoa(bystander.Process.Pid) + `;;
get_server_status*) echo ACTIVE;;
esac
`
	must.Do(t, errors.Join(os.Remove(program), os.WriteFile(program, []byte(script), 0o755)))
	out, code, stderr := run(t, n, "--mps")
	expect.Equal(t, code, 1, "exit code", stderr)
	if got := part(t, out, "mps.").find(t, "mps.start", n.Address(t, 0)); !strings.Contains(got.Observed, "which is no process of this daemon") {
		t.Errorf("got %+v", got)
	}
	select {
	case err := <-ended:
		t.Errorf("a process of the node was killed: %v", err)
	default:
	}
}
