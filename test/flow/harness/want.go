// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// RunSMI runs the machine's nvidia-smi, as an administrator does.
func (n *GPUs) RunSMI(t testing.TB, args string) string {
	t.Helper()
	out, err := n.TrySMI(t.Context(), args)
	must.Do(t, err, "nvidia-smi", args, out)
	return out
}

// TrySMI is RunSMI where that may fail.
func (n *GPUs) TrySMI(ctx context.Context, args string) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(n.Root, "usr/bin/nvidia-smi"), strings.Fields(args)...).CombinedOutput()
	return string(out), err
}

// WantInstances fails unless these are all live instances of a GPU, or soon are: a release may go on after its answer.
func (n *GPUs) WantInstances(t testing.TB, gpu int, want ...Place) {
	t.Helper()
	err := Eventually(t.Context(), func() error {
		if diff := cmp.Diff(want, Places(&n.Machine(t).GPUs[gpu])); diff != "" {
			return fmt.Errorf("instances of GPU %d (-want +got):\n%s", gpu, diff)
		}
		return nil
	})
	expect.Do(t, err)
}

// WantMode fails unless a whole GPU has this compute mode.
func (n *GPUs) WantMode(t testing.TB, gpu, mode int) {
	t.Helper()
	expect.Equal(t, n.Machine(t).GPUs[gpu].ComputeMode, mode, "GPU", gpu, "has compute mode")
}

// Servers are the process IDs of the MPS servers on a GPU.
func (n *GPUs) Servers(t testing.TB, gpu int) []int {
	t.Helper()
	var pids []int
	for _, p := range n.Machine(t).Processes {
		if p.GPU == gpu && p.Kind == machine.MPSServer {
			pids = append(pids, p.PID)
		}
	}
	slices.Sort(pids)
	return pids
}

// WantNoRoom fails if a device is prepared beside what others have.
func (n *Node) WantNoRoom(t testing.TB, p *Driver, device Device) {
	t.Helper()
	c := n.Allocate(t, []Device{device})
	// It would wait for the others to go.
	if _, err := p.TryPrepare(t.Context(), c, TinyTimeout); err == nil {
		t.Errorf("%+v was prepared beside what others have", device)
	}
	p.MustUnprepare(t, c)
}

// WithoutEnv removes the variables with this prefix from a container, as its program
// can.
func WithoutEnv(spec *oci.Spec, prefix string) *oci.Spec {
	spec.Process.Env = slices.DeleteFunc(spec.Process.Env, func(entry string) bool { return strings.HasPrefix(entry, prefix) })
	return spec
}

// WithoutDaemon removes all of MPS from a container, so that its program cannot reach
// the daemon.
func WithoutDaemon(spec *oci.Spec) *oci.Spec {
	WithoutEnv(spec, "CUDA_MPS_")
	spec.Hooks = nil
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m oci.Mount) bool {
		return m.Destination == "/tmp/nvidia-mps" || m.Destination == "/dev/shm"
	})
	return spec
}

// WantSlice fails unless a GPU has this time slice.
func (n *GPUs) WantSlice(t testing.TB, what string, gpu, slice int) {
	t.Helper()
	expect.Equal(t, n.Machine(t).GPUs[gpu].TimeSlice, slice, what, "GPU", gpu, "has the time slice")
}
