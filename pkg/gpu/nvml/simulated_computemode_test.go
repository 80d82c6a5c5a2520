// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	fatal "github.com/partage-dev/partage/test/must"
)

// expectMode asks the client, and looks into the machine at what the mode is.
func expectMode(t *testing.T, c *Client, pci, uuid string, want gpu.ComputeMode, in int) {
	t.Helper()
	expect.Equal(t, fatal.Get(c.ComputeMode(t.Context(), pci, uuid))(t), want, "mode of", pci, uuid)
	expect.Equal(t, in, int(computeModes[want]), pci, uuid, "mode", want)
}

func TestSimulatedComputeMode(t *testing.T) {
	c, file, ids := partitioned(t)
	ctx := t.Context()
	whole := func() int { return snapshot(t, file).GPUs[0].ComputeMode }
	part := func() int { return snapshot(t, file).GPUs[1].MIG.Instances[0].Compute[0].ComputeMode }

	for _, uuid := range []string{"", ids.otherUUID} {
		for _, mode := range []gpu.ComputeMode{gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault} {
			expect.Do(t, c.SetComputeMode(ctx, ids.other, uuid, mode), uuid, "to", mode)
			expectMode(t, c, ids.other, uuid, mode, whole())
		}
	}
	fatal.Do(t, c.SetComputeMode(ctx, ids.pci, ids.uuid, gpu.ComputeProhibited))
	expectMode(t, c, ids.pci, ids.uuid, gpu.ComputeProhibited, part())
	expectMode(t, c, ids.pci, "", gpu.ComputeDefault, snapshot(t, file).GPUs[1].ComputeMode)
	expectMode(t, c, ids.other, "", gpu.ComputeDefault, whole())

	// Setting what is set changes nothing, so that it needs no permission either.
	before := calls(t, file)[setComputeMode]
	expect.Do(t, c.SetComputeMode(ctx, ids.pci, ids.uuid, gpu.ComputeProhibited))
	if after := calls(t, file)[setComputeMode]; after != before {
		t.Errorf("%d calls to set what is set", after-before)
	}
	expect.Len(t, fatal.Get(file.Unmodelled())(t), 0, "functions that the simulated library does not have")
}

// A MIG device is found among the instances of its GPU. To look it up by UUID
// takes seconds under load.
func TestSimulatedMIGDeviceIsNotSearchedFor(t *testing.T) {
	c, file, ids := partitioned(t)
	fatal.Do(t, c.SetComputeMode(t.Context(), ids.pci, ids.uuid, gpu.ComputeProhibited))
	made := calls(t, file)
	for _, call := range []string{"nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigDeviceHandleByIndex"} {
		expect.Equal(t, made[call], 0, "calls of", call)
	}
}

func TestSimulatedComputeModeRefusals(t *testing.T) {
	c, _, ids := partitioned(t)
	const exclusive = gpu.ComputeExclusiveProcess
	tests := map[string]struct {
		pci, uuid string
		mode      gpu.ComputeMode
		want      error
	}{
		"whole GPU while MIG mode is on":    {pci: ids.pci, mode: exclusive, want: gpu.ErrNotSupported},
		"MIG device":                        {pci: ids.pci, uuid: ids.uuid, mode: exclusive, want: gpu.ErrNotSupported}, // MIG guide
		"MIG device of another GPU":         {pci: ids.other, uuid: ids.uuid, mode: exclusive, want: gpu.ErrNotFound},
		"MIG device that is gone":           {pci: ids.pci, uuid: "MIG-gone", mode: exclusive, want: gpu.ErrNotFound},
		"another GPU at the address":        {pci: ids.other, uuid: "GPU-gone", mode: exclusive, want: gpu.ErrNotFound},
		"no GPU at the address":             {pci: "0000:ff:00.0", mode: exclusive, want: gpu.ErrNotFound},
		"a mode that is none":               {pci: ids.other, mode: "EXCLUSIVE_THREAD", want: gpu.ErrInvalid},
		"no mode":                           {pci: ids.other, want: gpu.ErrInvalid},
		"MIG device of a GPU that has none": {pci: ids.other, uuid: "MIG-gone", mode: exclusive, want: gpu.ErrNotFound},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := c.SetComputeMode(t.Context(), test.pci, test.uuid, test.mode)
			var failed *gpu.Error
			if !errors.Is(err, test.want) || !errors.As(err, &failed) || failed.PCIAddress != test.pci || failed.Call == "" {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestSimulatedComputeModeWithoutMIG(t *testing.T) {
	c, file := simulate(t, newMachine(t, "t4x1"))
	pci := snapshot(t, file).GPUs[0].PCIAddress
	expect.Do(t, c.SetComputeMode(t.Context(), pci, "", gpu.ComputeExclusiveProcess))
	expectMode(t, c, pci, "", gpu.ComputeExclusiveProcess, snapshot(t, file).GPUs[0].ComputeMode)
	if _, err := c.ComputeMode(t.Context(), pci, "MIG-none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("MIG device of a GPU without MIG: %v", err)
	}
}

// Reasons arrive as they are, from whichever call they come.
func TestSimulatedComputeModeFails(t *testing.T) {
	reasons := map[nvml.Return]error{
		nvml.ERROR_NO_PERMISSION: gpu.ErrNoPermission, nvml.ERROR_GPU_IS_LOST: gpu.ErrLost, nvml.ERROR_UNKNOWN: gpu.ErrUnknown,
		nvml.ERROR_NOT_SUPPORTED: gpu.ErrNotSupported,
	}
	c, file, ids := partitioned(t)
	for code, want := range reasons {
		for _, call := range []string{getComputeMode, setComputeMode} {
			for pci, uuid := range map[string]string{ids.pci: ids.uuid, ids.other: ids.otherUUID} {
				fault := addFault(t, file, machine.Fault{Function: call, GPU: -1, Code: int(code)})
				if err := c.SetComputeMode(t.Context(), pci, uuid, gpu.ComputeExclusiveProcess); !errors.Is(err, want) {
					t.Errorf("%s on %s, code %d: %v", call, uuid, code, err)
				}
				removeFault(t, file, fault)
			}
		}
	}
	for pci, uuid := range map[string]string{ids.pci: ids.uuid, ids.other: ids.otherUUID} {
		expect.Equal(t, fatal.Get(c.ComputeMode(t.Context(), pci, uuid))(t), gpu.ComputeDefault, "afterwards", uuid)
	}
}

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
	fatal.Get(c.ComputeMode(t.Context(), pci, ""))(t)
	old.uuidResult = nvml.ERROR_INVALID_ARGUMENT
	fresh := &fakeDevice{busID: busID, mig: true}
	lib.devices[0] = fresh
	fatal.Do(t, c.SetComputeMode(t.Context(), pci, "GPU-"+busID, gpu.ComputeExclusiveProcess))
	if old.compute.sets != 0 || fresh.compute.mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS {
		t.Errorf("old handle set %d times, mode is %d", old.compute.sets, fresh.compute.mode)
	}
}
