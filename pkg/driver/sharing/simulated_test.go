// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// simulate makes a machine with two GPUs and a manager of it, whose supervisor is
// that of the node.
func simulate(t *testing.T, n *node) (*Manager, *state.File, []Device) {
	t.Helper()
	out := t.TempDir()
	library, smi := filepath.Join(out, "libnvidia-ml.so"), filepath.Join(out, "nvidia-smi")
	for _, command := range [][]string{
		{"make", "-s", "-C", "../../../test/gpusim/lib", "OUT=" + out},
		{"go", "build", "-o", smi, "../../../test/gpusim/cmd/nvidia-smi"},
	} {
		if text, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, text)
		}
	}
	m, err := catalog.Machine("h100-80-sxmx2", catalog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	err = sysroot.Create(root, m, sysroot.Assets{NVML: library, CUDA: library, NVIDIASMI: smi})
	if errors.Is(err, fs.ErrPermission) {
		t.Skipf("a simulated machine cannot be made here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	file := must.Get(state.Open(sysroot.StatePath(root)))(t)
	t.Cleanup(func() { file.Close() })

	t.Setenv("GPUSIM_STATE", sysroot.StatePath(root))
	roots := host.Roots{Driver: root, Sys: filepath.Join(root, "sys")}
	gpus := nvml.New(nvml.Options{Roots: roots})
	t.Cleanup(gpus.Close)
	must.Do(t, gpus.Open(t.Context()))
	devices := []Device{
		{PCIAddress: m.GPUs[0].PCIAddress, UUID: m.GPUs[0].UUID}, {PCIAddress: m.GPUs[1].PCIAddress, UUID: m.GPUs[1].UUID},
	}
	return New(Options{Roots: roots, Modes: gpus, Supervisor: n}), file, devices
}

// With the driver's library and its program, what is asked for is what the machine
// has.
func TestSimulated(t *testing.T) {
	const exclusiveProcess = 3 // NVML's number
	n := newNode(t)
	m, file, devices := simulate(t, n)
	look := func() []machine.GPU {
		t.Helper()
		now := must.Get(file.Snapshot())(t)
		return now.GPUs
	}
	spec := mps.Spec{ID: id}
	for _, d := range devices {
		spec.Devices = append(spec.Devices, d.UUID)
	}
	setModes := func(exclusive bool) {
		t.Helper()
		for _, d := range devices {
			must.Do(t, m.SetExclusive(t.Context(), d, exclusive))
		}
	}
	setModes(true)
	must.Get(m.Ensure(t.Context(), spec, devices))(t)
	for _, g := range look() {
		if g.ComputeMode != exclusiveProcess {
			t.Errorf("%s: mode %d while the session runs", g.PCIAddress, g.ComputeMode)
		}
	}
	must.Do(t, m.End(t.Context(), spec.ID))
	setModes(false)
	for _, g := range look() {
		if g.ComputeMode != 0 {
			t.Errorf("%s: mode %d after the session", g.PCIAddress, g.ComputeMode)
		}
	}

	for interval, want := range map[Interval]int{
		policy.IntervalShort: 1, policy.IntervalMedium: 2, policy.IntervalLong: 3, policy.IntervalDefault: 0,
	} {
		if err := m.SetInterval(t.Context(), devices[1], interval); err != nil {
			t.Errorf("%s: %v", interval, err)
		}
		if gpus := look(); gpus[1].TimeSlice != want || gpus[0].TimeSlice != 0 {
			t.Errorf("%s: the machine has %d and %d, want 0 and %d", interval, gpus[0].TimeSlice, gpus[1].TimeSlice, want)
		}
	}
	gone := Device{PCIAddress: devices[0].PCIAddress, UUID: "GPU-gone"}
	if err := m.SetInterval(t.Context(), gone, policy.IntervalLong); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("GPU that is gone: %v", err)
	}
	if err := m.SetInterval(t.Context(), gone, policy.IntervalDefault); err != nil {
		t.Errorf("GPU that is gone, back to default: %v", err)
	}
}
