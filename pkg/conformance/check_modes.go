// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// modeChecks are about the modes of GPUs, which the driver changes as claims need it.
var modeChecks = []Check{
	{
		ID:         "modes.mig",
		Assumption: "the MIG mode is what it was set to: no change waits for a reset",
		Code:       "pkg/gpu/nvml/mig.go",
		Run:        checkMIGMode,
	},
	{
		ID:         "modes.compute",
		Assumption: "nobody else restricts who may use a GPU",
		Code:       "pkg/sharing/effects.go",
		Run:        checkComputeMode,
	},
	{
		ID:         "modes.coherent-memory",
		Assumption: "a GPU that is coherent with the CPU has no partitions where the driver manages its memory",
		Code:       "pkg/device/catalog.go",
		Run:        checkCoherentMemory,
	},
	{
		ID:         "modes.fabric",
		Assumption: "undivided GPUs are registered with the NVLink fabric that they belong to",
		Code:       "pkg/partition/effects.go",
		Run:        checkFabric,
	},
}

// checkCoherentMemory looks for a GPU that shows that the driver takes too little to be possible.
func checkCoherentMemory(ctx context.Context, n *Node) []Finding {
	const expected = "with CoherentGPUMemoryMode=driver, MIG mode is off"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		switch g.CoherentMemory {
		case gpu.CoherentDriver:
		case gpu.CoherentUnknown:
			return []Finding{Cannot(g.PCIAddress, expected, "/proc/driver/nvidia/params does not say who manages its memory")}
		default:
			return nil
		}
		state, err := n.migState(ctx, g)
		if errors.Is(err, gpu.ErrNotSupported) {
			return []Finding{Expect(g.PCIAddress, true, expected, "no MIG")}
		}
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		return []Finding{Expect(g.PCIAddress, !state.Enabled, expected, onOff(state.Enabled)).
			Because("the GPU is published without partitions, since NVIDIA does not support them in this mode: please report that it works")}
	})
}

func checkFabric(ctx context.Context, n *Node) []Finding {
	const expected = "Completed, or no fabric"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		if g.MIG != nil && g.MIG.Enabled {
			return nil // the driver does not register it
		}
		pending, err := Ask(ctx, n, NVML, "registration of GPU "+g.PCIAddress+" with the NVLink fabric", func(ctx context.Context) (string, error) {
			hardware, err := n.Hardware(ctx)
			if err != nil {
				return "", err
			}
			return hardware.FabricPending(ctx, g.PCIAddress)
		})
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		return []Finding{Expect(g.PCIAddress, pending == "", expected, cmp.Or(pending, expected)).
			Because("CUDA programs do not start on it (error 802) until it is: does the fabric manager run, in the driver's version?")}
	})
}

func checkMIGMode(ctx context.Context, n *Node) []Finding {
	const expected = "no change is pending"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		if g.MIG == nil {
			return nil
		}
		state, err := n.migState(ctx, g)
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		observed := fmt.Sprintf("%s, %d instances", onOff(state.Enabled), len(state.Instances))
		if state.Pending != state.Enabled {
			observed = fmt.Sprintf("%s, %s after a reset", onOff(state.Enabled), onOff(state.Pending))
		}
		return []Finding{Expect(g.PCIAddress, state.Pending == state.Enabled, expected, observed).
			Because("the GPU offers what its present mode allows until it is reset")}
	})
}

func (n *Node) migState(ctx context.Context, g *gpu.GPU) (gpu.MIGState, error) {
	return Ask(ctx, n, NVML, "MIG state of GPU "+g.PCIAddress, func(ctx context.Context) (gpu.MIGState, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return gpu.MIGState{}, err
		}
		return hardware.MIGState(ctx, g.PCIAddress)
	})
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func checkComputeMode(ctx context.Context, n *Node) []Finding {
	const expected = "DEFAULT, or EXCLUSIVE_PROCESS with an MPS session of this driver"
	var sessions []mps.Status
	asked := false
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		if g.MIG != nil && g.MIG.Enabled {
			return nil // each MIG device has a mode of its own, and it has none
		}
		mode, err := Ask(ctx, n, NVML, "compute mode of GPU "+g.PCIAddress, func(ctx context.Context) (gpu.ComputeMode, error) {
			hardware, err := n.Hardware(ctx)
			if err != nil {
				return "", err
			}
			return hardware.ComputeMode(ctx, g.PCIAddress, g.UUID)
		})
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		if mode == gpu.ComputeExclusiveProcess {
			if !asked {
				sessions, err = n.sessions(ctx)
				asked = err == nil
			}
			if err != nil {
				return []Finding{Cannot(g.PCIAddress, expected, "the mode is %s, and the MPS supervisor does not say whose: %v", mode, err)}
			}
			ours := slices.ContainsFunc(sessions, func(s mps.Status) bool { return slices.Contains(s.Spec.Devices, g.UUID) })
			return []Finding{Expect(g.PCIAddress, ours, expected, observedMode(mode, ours)).
				Because("shares of this GPU are refused until somebody sets the mode to DEFAULT: nvidia-smi -i %s -c DEFAULT", g.UUID)}
		}
		return []Finding{Expect(g.PCIAddress, mode == gpu.ComputeDefault, expected, string(mode)).
			Because("no program can use this GPU until somebody sets the mode to DEFAULT: nvidia-smi -i %s -c DEFAULT", g.UUID)}
	})
}

func observedMode(mode gpu.ComputeMode, ours bool) string {
	if ours {
		return string(mode) + " with a session"
	}
	return string(mode) + " without a session"
}

// sessions returns the MPS sessions of the node.
func (n *Node) sessions(ctx context.Context) ([]mps.Status, error) {
	return Ask(ctx, n, Command, "sessions of the MPS supervisor", func(ctx context.Context) ([]mps.Status, error) {
		return mps.Client{Socket: filepath.Join(n.MPSDir, mps.SocketName)}.List(ctx)
	})
}
