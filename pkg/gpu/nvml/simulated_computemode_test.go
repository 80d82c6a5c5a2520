// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// expectMode asks the client, and looks into the machine at what the mode is.
func expectMode(t *testing.T, c *Client, pci, uuid string, want gpu.ComputeMode, in int) {
	t.Helper()
	got, err := c.ComputeMode(t.Context(), pci, uuid)
	if err != nil || got != want {
		t.Errorf("mode of %s %s: %s, %v; want %s", pci, uuid, got, err, want)
	}
	if in != int(computeModes[want]) {
		t.Errorf("%s %s: the machine has mode %d, want %s", pci, uuid, in, want)
	}
}

func TestSimulatedComputeMode(t *testing.T) {
	c, file, ids := partitioned(t)
	ctx := t.Context()
	whole := func() int { return snapshot(t, file).GPUs[0].ComputeMode }
	part := func() int { return snapshot(t, file).GPUs[1].MIG.Instances[0].Compute[0].ComputeMode }

	for _, uuid := range []string{"", ids.otherUUID} {
		for _, mode := range []gpu.ComputeMode{gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault} {
			if err := c.SetComputeMode(ctx, ids.other, uuid, mode); err != nil {
				t.Errorf("%q to %s: %v", uuid, mode, err)
			}
			expectMode(t, c, ids.other, uuid, mode, whole())
		}
	}
	if err := c.SetComputeMode(ctx, ids.pci, ids.uuid, gpu.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	expectMode(t, c, ids.pci, ids.uuid, gpu.ComputeProhibited, part())
	expectMode(t, c, ids.pci, "", gpu.ComputeDefault, snapshot(t, file).GPUs[1].ComputeMode)
	expectMode(t, c, ids.other, "", gpu.ComputeDefault, whole())

	// Setting what is set changes nothing, so that it needs no permission either.
	before := calls(t, file)[setComputeMode]
	if err := c.SetComputeMode(ctx, ids.pci, ids.uuid, gpu.ComputeProhibited); err != nil {
		t.Error(err)
	}
	if after := calls(t, file)[setComputeMode]; after != before {
		t.Errorf("%d calls to set what is set", after-before)
	}
	unmodelled, err := file.Unmodelled()
	if err != nil || len(unmodelled) > 0 {
		t.Errorf("functions that the simulated library does not have: %v, %v", unmodelled, err)
	}
}

// A MIG device is found among the instances of its GPU. To look it up by UUID
// takes seconds under load.
func TestSimulatedMIGDeviceIsNotSearchedFor(t *testing.T) {
	c, file, ids := partitioned(t)
	if err := c.SetComputeMode(t.Context(), ids.pci, ids.uuid, gpu.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	made := calls(t, file)
	for _, call := range []string{"nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigDeviceHandleByIndex"} {
		if made[call] != 0 {
			t.Errorf("%d calls of %s", made[call], call)
		}
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
	if err := c.SetComputeMode(t.Context(), pci, "", gpu.ComputeExclusiveProcess); err != nil {
		t.Error(err)
	}
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
		if mode, err := c.ComputeMode(t.Context(), pci, uuid); err != nil || mode != gpu.ComputeDefault {
			t.Errorf("afterwards %s: %s, %v", uuid, mode, err)
		}
	}
}
