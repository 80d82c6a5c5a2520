// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"path/filepath"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/cgroup"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// limitingNode is one with cgroups of version 2 and a driver that limits their memory, or not.
func limitingNode(t *testing.T, driver string) (n *harness.Node, tree string) {
	t.Helper()
	harness.SkipWithoutMounts(t)
	n = harness.NewNode(t, "t4x1", func(m *machine.Machine) { m.DriverVersion = driver })
	tree = filepath.Join(n.Root, "sys/fs/cgroup")
	cgroup.MountAt(t, tree)
	n.StartSupervisor(t)
	return n, tree
}

// containerIn is a container in a cgroup, which its programs see, as those of the simulator must.
func containerIn(t *testing.T, n *harness.Node, dir string, ids []string, env ...string) *oci.Spec {
	t.Helper()
	spec := n.Container(t, ids...)
	spec.Linux.CgroupsPath = dir
	spec.Mounts = append(spec.Mounts, oci.Mount{Source: dir, Destination: dir})
	spec.Process.Env = append(spec.Process.Env, env...)
	return spec
}

// TestDriverLimitsMemory: the processes of a container have their share's memory together, whatever they set for themselves, and
// what another container has is not theirs.
func TestDriverLimitsMemory(t *testing.T) {
	t.Parallel()
	const outOfMemory = "CUDA_ERROR_OUT_OF_MEMORY"
	for name, kind := range map[string]harness.ShareKind{"time slices": harness.TimeSlice, "MPS": harness.MPS} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, tree := limitingNode(t, "615.71.09")
			p := n.Run(t)
			wantMemoryLimit(t, n, kind, "driver")
			share := func() []string {
				return p.MustPrepare(t, n.Allocate(t, []harness.Device{{Kind: kind, Memory: 4 << 30, Percent: 25}}))
			}
			ids, one := share(), cgroup.Make(t, tree, "one")
			must.Get(n.StartReady(t.Context(), t, containerIn(t, n, one, ids), "hold", "--memory=3Gi"))(t)
			wantFailure(t, n, containerIn(t, n, one, ids), outOfMemory, "alloc", "2Gi")
			ids, other := share(), cgroup.Make(t, tree, "other")
			wantOutput(t, n, containerIn(t, n, other, ids), []string{"allocated 3072 MiB"}, "alloc", "3Gi")
			wantFailure(t, n, containerIn(t, n, other, ids, "NVIDIA_GPU_MEMORY_LIMIT=1024"), outOfMemory, "alloc", "1Gi")
			// The container's next cgroup has limits of its own.
			wantOutput(t, n, containerIn(t, n, cgroup.Make(t, tree, "again"), ids), []string{"allocated 3072 MiB"}, "alloc", "3Gi")
		})
	}
}

// TestDriverDoesNotLimitMemory: before driver 615, and where the administrator wants it so, nothing is different.
func TestDriverDoesNotLimitMemory(t *testing.T) {
	t.Parallel()
	for driver, flags := range map[string][]string{"610.10.01": nil, "615.71.09": {"--memory-limits=false"}} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			n, tree := limitingNode(t, driver)
			p := n.Run(t, flags...)
			wantMemoryLimit(t, n, harness.TimeSlice, "none")
			wantMemoryLimit(t, n, harness.MPS, "server")
			ids := p.MustPrepare(t, n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice, Memory: 4 << 30}}))
			spec := containerIn(t, n, cgroup.Make(t, tree, "one"), ids, "NVIDIA_GPU_MEMORY_LIMIT=1024")
			wantOutput(t, n, spec, []string{"allocated 6144 MiB"}, "alloc", "6Gi")
		})
	}
}

// TestMemoryLimitRefused: no container starts whose limit is not in effect, and it starts once it can be.
func TestMemoryLimitRefused(t *testing.T) {
	t.Parallel()
	n, tree := limitingNode(t, "615.71.09")
	p := n.Run(t)
	ids := p.MustPrepare(t, n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice, Memory: 4 << 30}}))
	for name, fault := range map[string]machine.Fault{
		"a driver that refuses":                {Function: "nvmlDeviceSetMemoryLimits_v1", Code: 999},
		"a driver that only says that it does": {Function: "nvmlDeviceSetMemoryLimits_v1", Effect: machine.Pretend},
		"a driver that cannot be asked":        {Function: "nvmlDeviceGetMemoryLimits_v1", Code: 999},
	} {
		t.Run(name, func(t *testing.T) {
			injected := n.Inject(t, fault)
			wantNoContainer(t, n, containerIn(t, n, cgroup.Make(t, tree, "refused"), ids), "does not limit this container to 4096 MiB of GPU "+n.Address(t, 0))
			injected.Remove(t)
			wantOutput(t, n, containerIn(t, n, cgroup.Make(t, tree, "starts"), ids), []string{"allocated 512 MiB"}, "alloc", "512Mi")
		})
	}
	t.Run("two shares of the GPU", func(t *testing.T) {
		two := p.MustPrepare(t, n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice, Memory: 1 << 30}}))
		wantNoContainer(t, n, containerIn(t, n, cgroup.Make(t, tree, "two"), append(two, ids...)), "several shares of one GPU")
	})
	t.Run("a plugin that is replaced", func(t *testing.T) {
		spec := containerIn(t, n, cgroup.Make(t, tree, "waits"), ids)
		p.Kill()
		out := make(chan error, 1)
		go func() {
			_, err := n.RunProgram(t, spec, "alloc", "512Mi")
			out <- err
		}()
		n.Start(t)
		expect.Do(t, <-out, "the container does not start with the next plugin")
	})
}

// wantMemoryLimit fails unless shares of the GPU say who holds their memory.
func wantMemoryLimit(t *testing.T, n *harness.Node, kind harness.ShareKind, want string) {
	t.Helper()
	for name, d := range n.Published() {
		if *d.Attributes["type"].StringValue == string(kind) {
			expect.Equal(t, *d.Attributes["memoryLimit"].StringValue, want, "device", name, "has the memory limit")
			return
		}
	}
	t.Errorf("no %s share is published", kind)
}
