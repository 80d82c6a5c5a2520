// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
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
			events, err := probe.Program{Path: harness.Built.Probe, Env: env}.Run(t.Context(), probe.Options{Library: library, Look: true})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range events {
				if e.Kind == probe.Device {
					got = append(got, e.UUID)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("devices: -cuda-client +cuda-probe:\n%s", diff)
			}
			if e, failed := probe.Find(events, probe.Failed); failed != (len(want) == 0) || failed && !strings.Contains(e.Result, "NO_DEVICE") {
				t.Errorf("%d devices, and the probe says %+v", len(want), e)
			}
		})
	}
}
