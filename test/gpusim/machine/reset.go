// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Reset does to a GPU what a reset does: its instances are gone, and what waited for one
// has happened. Its failure is gone if it was one that a reset heals. A MIG mode that needs
// a reset to change is kept otherwise, any other is off. What was counted for ever, what is
// broken for good and how hot it is stays, as does the time slice, which the kernel module has.
func (g *GPU) Reset() {
	g.Resets++
	g.ComputeMode = 0
	switch nvml.Return(g.Failure) {
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_RESET_REQUIRED:
		g.Failure = 0
	}
	h := &g.Health
	h.VolatileECC, h.RecoveryAction = ECCErrors{}, 0
	h.RemappedRows.Pending, h.ChannelRepair, h.TPCRepair, h.RetiredPagesPending = false, false, false, false
	if g.MIG == nil {
		return
	}
	g.MIG.Instances = nil
	g.MIG.Current = g.MIG.ResetToSwitch && g.MIG.Pending
	g.MIG.Pending = g.MIG.Current
}

// ResetGPU resets the GPU with this index. It fails while a process holds the GPU or has
// its device nodes open, as nvidia-smi does.
func (m *Machine) ResetGPU(gpu int) error {
	for _, p := range m.Processes {
		if p.GPU == gpu {
			return fmt.Errorf("GPU %d is in use by process %d (%s)", gpu, p.PID, p.Name)
		}
	}
	m.GPUs[gpu].Reset()
	return nil
}
