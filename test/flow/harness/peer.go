// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"path/filepath"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// Where a container of NVIDIA's DRA driver has what the driver looks for.
const (
	peerProgram    = "/usr/bin/gpu-kubelet-plugin"
	peerDriverRoot = "/driver-root"
)

// StartPeer runs NVIDIA's DRA driver on the node until the test ends, with feature gates as
// its own flag has them. It reads /proc and /sys where they always are, so it gets a mount
// namespace in which they are those of the simulated machine.
func (n *Node) StartPeer(t testing.TB, program, featureGates string) *Driver {
	t.Helper()
	SkipWithoutMounts(t)
	dir, proc := filepath.Dir(n.Root), filepath.Join(sysroot.DriverRoot(n.Root), "proc")
	var mounts []oci.Mount
	for _, m := range [][2]string{
		{program, peerProgram},
		{dir, dir},
		{n.DriverRoot(), peerDriverRoot},
		{n.Root + "/sys", "/sys"},
		{proc + "/devices", "/proc/devices"},
		{proc + "/driver", "/proc/driver"},
		{Built.NVIDIAHook, "/usr/bin/nvidia-cdi-hook"},
	} {
		mounts = append(mounts, oci.Mount{Source: m[0], Destination: m[1]})
	}
	spec := &oci.Spec{
		Mounts: mounts,
		Linux:  &oci.Linux{Devices: []oci.LinuxDevice{{Path: os.DevNull, Major: 1, Minor: 3}}},
		Process: &oci.Process{
			Args: []string{
				peerProgram,
				"--node-name=" + NodeName, "--image-name=unused",
				"--kubeconfig=" + n.Kubeconfig, "--kube-api-qps=100000", "--kube-api-burst=100000",
				"--container-driver-root=" + peerDriverRoot, "--nvidia-driver-root=" + n.DriverRoot(),
				"--cdi-root=" + n.CDIDir,
				"--kubelet-plugins-directory-path=" + n.PluginsDir, "--kubelet-registrar-directory-path=" + n.RegistrarDir,
				"--feature-gates=" + featureGates,
				// As in its chart.
				"-v=4",
			},
			Env: []string{"PATH=/usr/bin:/bin"},
		},
	}
	p := &Driver{Process: newProcess(containerCommand(n.bundle(t, spec)))}
	p.startFor(t)
	p.registerAt(t, filepath.Join(n.RegistrarDir, DriverName+"-reg.sock"))
	return p
}
