// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

var uuid = regexp.MustCompile(`UUID: (?:GPU|MIG)-(\S+)`)

// TestProbeAndClient: the simulated libcuda, which is in C, shows a program the devices
// that cuda-client sees, which is in Go.
func TestProbeAndClient(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		g := m.GPUs[1].MIG
		g.Current, g.Pending = true, true
		for i, id := range []string{"MIG-aaaaaaaa-0000-0000-0000-000000000001", "MIG-bbbbbbbb-0000-0000-0000-000000000002"} {
			g.Instances = append(g.Instances, g.Profiles[0].Instance(i, id))
		}
	})
	gpu := n.Machine(t).GPUs[0].UUID
	library := filepath.Join(sysroot.LibraryDir(n.Root), "libcuda.so.1")
	for _, visible := range []string{"unset", "", "0", "1", "0,1", "1,0", "0,9,1", "0,0", gpu, gpu[:12], " 0 , 1", "MIG-bbbbbbbb", "MIG-aaaaaaaa,MIG-bbbbbbbb", "x"} {
		t.Run(visible, func(t *testing.T) {
			env := []string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}
			if visible != "unset" {
				env = append(env, "CUDA_VISIBLE_DEVICES="+visible)
			}
			cmd := exec.CommandContext(t.Context(), harness.Built.Client, "info")
			cmd.Env = append(env, "GPUSIM_STATE="+sysroot.StatePath(n.Root))
			out, _ := cmd.Output() // without devices it fails
			var want []string
			for _, found := range uuid.FindAllStringSubmatch(string(out), -1) {
				want = append(want, found[1])
			}
			events := look(t, library, env)
			var got []string
			for _, e := range events {
				if e.Kind == probe.Device {
					got = append(got, e.UUID)
				}
			}
			expect.Same(t, got, want, "devices seen by cuda-probe")
			if e, failed := probe.Find(events, probe.Failed); failed != (len(want) == 0) || failed && !strings.Contains(e.Result, "NO_DEVICE") {
				t.Errorf("%d devices, and the probe says %+v", len(want), e)
			}
		})
	}
}

// look returns what cuda-probe says with this environment and nothing else.
func look(t *testing.T, library string, env []string) []probe.Event {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Built.Probe, probe.Options{Library: library}.Arguments()...)
	cmd.Env = env
	out, _ := cmd.Output() // without devices it fails
	return probe.Read(bytes.NewReader(out))
}

// TestProbeOnItsDeviceOnly: a program that does not reach MPS takes nothing of another GPU than the one that it is
// started for, and one that is started for none takes nothing.
func TestProbeOnItsDeviceOnly(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		m.Processes = append(m.Processes, machine.Process{PID: 47114711, Name: "train", GPU: 0, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30})
	})
	before := n.Machine(t).Processes
	program := probe.Program{Path: harness.Built.Probe, Device: n.Machine(t).GPUs[1].UUID, Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}}
	o := probe.Options{Library: filepath.Join(sysroot.LibraryDir(n.Root), "libcuda.so.1"), Allocate: 64 << 20, Hold: true}
	run := must.Get(program.Start(t.Context(), o))(t)
	if events, err := run.Until(t.Context(), probe.Holding); err != nil || events[len(events)-1].Kind != probe.Holding {
		t.Errorf("got %+v, %v", events, err)
	}
	during := n.Machine(t).Processes
	if len(during) != len(before)+1 || during[len(before)].GPU != 1 {
		t.Errorf("the processes on the GPUs are %+v, want one more, on GPU 1", during)
	}
	expect.Same(t, during[:len(before)], before, "the program of others")
	expect.Do(t, expect.Err(run.Finish(t.Context())))
	program.Device, o.Hold = "", false
	events, err := program.Run(t.Context(), o)
	if e, failed := probe.Find(events, probe.Failed); err != nil || !failed || !strings.Contains(e.Result, "NO_DEVICE") {
		t.Errorf("for no device: got %+v, %v", events, err)
	}
}
