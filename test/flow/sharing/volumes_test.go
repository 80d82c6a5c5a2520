// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"slices"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// named changes a machine into one whose MPS servers have their shared memory in /dev/shm, where clients must see it.
func named(m *machine.Machine) { m.MPS.NamedSharedMemory = true }

// shareOf is a node with a claim for an MPS share, and what its containers get.
func shareOf(t *testing.T, change ...func(*machine.Machine)) (n *harness.Node, ids []string) {
	t.Helper()
	n = harness.NewNode(t, "h100x1", change...)
	n.StartSupervisor(t)
	p := n.Start(t)
	return n, p.MustPrepare(t, n.Allocate(t, []harness.Device{{Kind: harness.MPS, Memory: 10 << 30}}))
}

// TestVolumeHidesDaemon: a volume of the pod that hides the daemon's socket keeps the container from starting. Its programs
// would run without MPS, and on a partition without limits.
func TestVolumeHidesDaemon(t *testing.T) {
	for name, at := range map[string]oci.Mount{
		"at its folder": {Destination: "/tmp/nvidia-mps/", Source: t.TempDir(), Type: "bind", Options: []string{"bind"}},
		"at its socket": {Destination: "/tmp/nvidia-mps/control", Source: "/dev/null", Type: "bind", Options: []string{"bind"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, ids := shareOf(t)
			// As a runtime that mounts the volumes of a pod last. Others do so with the socket, which is deeper.
			spec := n.Container(t, ids...)
			spec.Mounts = append(spec.Mounts, at)
			if _, err := n.NewProgram(t.Context(), t, spec, "info"); err == nil {
				t.Error("a container starts in which a volume hides the MPS daemon")
			}
		})
	}
}

// TestSharedMemoryOfShare: containers have a folder in common with others only where the driver needs it.
func TestSharedMemoryOfShare(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change []func(*machine.Machine)
		want   bool
	}{"without a name": {nil, false}, "with a name": {[]func(*machine.Machine){named}, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, ids := shareOf(t, test.change...)
			spec := n.Container(t, ids...)
			has := slices.ContainsFunc(spec.Mounts, func(m oci.Mount) bool { return m.Destination == "/dev/shm" && m.Type != "tmpfs" })
			expect.Equal(t, has, test.want, "a container has the session's /dev/shm", spec.Mounts)
			wantOutput(t, n, spec, []string{"as a client", "limit 10240 MiB"}, "info")
		})
	}
}

// TestPodBesideShare: what a pod has of its own where the claim has something does not keep its programs from being clients
// with the claim's limits. The runtime adds a claim's devices to what the pod says.
func TestPodBesideShare(t *testing.T) {
	t.Parallel()
	n, ids := shareOf(t, named)
	volume := func(at string) oci.Spec {
		return oci.Spec{Mounts: []oci.Mount{{Destination: at, Source: t.TempDir(), Type: "bind", Options: []string{"bind"}}}}
	}
	variable := func(v string) oci.Spec { return oci.Spec{Process: &oci.Process{Env: []string{v}}} }
	pods := map[string]oci.Spec{
		"volume at /tmp":             volume("/tmp"),
		"volume at the folder":       volume("/tmp/nvidia-mps"),
		"volume at the folder/":      volume("/tmp/nvidia-mps/"),
		"volume at /dev/shm":         volume("/dev/shm"),
		"volume at /dev/shm/":        volume("/dev/shm/"),
		"another daemon":             variable("CUDA_MPS_PIPE_DIRECTORY=/nowhere"),
		"no daemon":                  variable("CUDA_MPS_PIPE_DIRECTORY="),
		"limit of an absent device":  variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=9=1G"),
		"larger limit":               variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=70G"),
		"more of the multiprocessor": variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"),
	}
	for name, pod := range pods {
		t.Run(name, func(t *testing.T) {
			spec := n.InjectCDI(t, &pod, ids...)
			wantOutput(t, n, spec, []string{"as a client", "limit 10240 MiB", "(25 %)"}, "info")
		})
	}
}
