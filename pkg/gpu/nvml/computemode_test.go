// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// What the library answers is not believed before it is read back. What it does
// when all is well is tested against the simulated one.
func TestComputeModeIsReadBack(t *testing.T) {
	const thread = nvml.COMPUTEMODE_EXCLUSIVE_THREAD
	tests := map[string]struct {
		device fakeComputeMode
		says   string // empty: no error
		sets   int
	}{
		"set":            {sets: 1},
		"set already":    {device: fakeComputeMode{mode: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS}},
		"nothing done":   {device: fakeComputeMode{kept: true}, says: "the mode is DEFAULT instead of EXCLUSIVE_PROCESS", sets: 1},
		"refused":        {device: fakeComputeMode{result: nvml.ERROR_NO_PERMISSION}, says: "Insufficient Permissions", sets: 1},
		"mode of old":    {device: fakeComputeMode{mode: thread}, says: "unknown compute mode 1"},
		"mode to become": {device: fakeComputeMode{mode: 17}, says: "unknown compute mode 17"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			device := &fakeDevice{busID: busID, compute: test.device}
			c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
			err := c.SetComputeMode(t.Context(), pci, "", gpu.ComputeExclusiveProcess)
			if (err == nil) != (test.says == "") || device.compute.sets != test.sets {
				t.Fatalf("%v after %d calls", err, device.compute.sets)
			}
			if err == nil {
				return
			}
			var failed *gpu.Error
			if !errors.As(err, &failed) || failed.PCIAddress != pci || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
		})
	}
}

// A handle from before a reset is replaced.
func TestComputeModeAfterReset(t *testing.T) {
	old := &fakeDevice{busID: busID, mig: true}
	lib := &fakeLibrary{devices: []*fakeDevice{old}}
	c := openFake(t, lib)
	if _, err := c.ComputeMode(t.Context(), pci, ""); err != nil {
		t.Fatal(err)
	}
	old.uuidResult = nvml.ERROR_INVALID_ARGUMENT
	fresh := &fakeDevice{busID: busID, mig: true}
	lib.devices[0] = fresh
	if err := c.SetComputeMode(t.Context(), pci, "GPU-"+busID, gpu.ComputeExclusiveProcess); err != nil {
		t.Fatal(err)
	}
	if old.compute.sets != 0 || fresh.compute.mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS {
		t.Errorf("old handle set %d times, mode is %d", old.compute.sets, fresh.compute.mode)
	}
}
