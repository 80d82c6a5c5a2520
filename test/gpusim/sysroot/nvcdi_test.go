// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// NVIDIA's own library, which decides what of a driver goes into containers,
// finds everything that a container on a simulated machine needs.
func TestNvcdiFindsTheDriver(t *testing.T) {
	root := t.TempDir()
	create(t, root, machineOf(t, "dgx-h100"), fakeAssets(t))
	success := func() nvml.Return { return nvml.SUCCESS }
	lib := must.Get(nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithNvmlLib(&mock.Interface{
			InitFunc: success, ShutdownFunc: success,
			SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "580.95.05", nvml.SUCCESS },
		}),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils, nvcdi.FeatureDisableIPCDiscoverer),
	))(t)
	edits := must.Get(lib.GetCommonEdits())(t)
	var mounts, nodes []string
	for _, m := range edits.Mounts {
		expect.Equal(t, filepath.Join(root, m.ContainerPath), m.HostPath, m.ContainerPath, "is mounted from")
		mounts = append(mounts, m.ContainerPath)
	}
	for _, n := range edits.DeviceNodes {
		nodes = append(nodes, n.Path)
	}
	slices.Sort(mounts)
	slices.Sort(nodes)
	dir := strings.TrimPrefix(LibraryDir(root), root)
	if d := cmp.Diff([]string{
		"/usr/bin/nvidia-cuda-mps-control",
		"/usr/bin/nvidia-cuda-mps-server",
		"/usr/bin/nvidia-smi",
		dir + "/libcuda.so.580.95.05",
		dir + "/libnvidia-gpusim-state.so.580.95.05",
		dir + "/libnvidia-ml.so.580.95.05",
	}, mounts); d != "" {
		t.Errorf("mounts: %s", d)
	}
	expect.Same(t, nodes, []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}, "nodes")
}
