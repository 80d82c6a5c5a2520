// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
)

const (
	getMemoryLimits = "nvmlDeviceGetMemoryLimits_v1"
	setMemoryLimits = "nvmlDeviceSetMemoryLimits_v1"
)

// readMemoryLimits finds out whether the driver limits the memory of cgroups, by asking for the limits of this process's own,
// which changes nothing. What was found out stays so until the driver is loaded again. That limits are not supported while MIG
// mode is on says nothing of later, and what cannot be asked is no reason to do without the GPU.
func readMemoryLimits(r *reading, roots host.Roots, g *gpu.GPU) {
	if r.err != nil {
		return
	}
	g.MemoryLimits = cached(&r.memoryLimits, func() (supported, known bool) {
		cgroup, err := roots.OwnCgroup()
		if err != nil {
			klog.FromContext(r.ctx).V(4).Info("The driver cannot be asked for memory limits", "reason", err)
			return false, false
		}
		_ = must(r, getMemoryLimits, func() (nvml.MemoryLimits_v1, nvml.Return) { return r.dev.GetMemoryLimits_v1(cgroup) })
		switch err := r.err; {
		case err == nil, errors.Is(err, gpu.ErrNotFound): // it has none
			supported, known, r.err = true, true, nil
		case errors.Is(err, gpu.ErrNotSupported):
			known, r.err = g.MIG == nil || !g.MIG.Enabled, nil
		case !gpu.IsPending(err):
			klog.FromContext(r.ctx).V(2).Info("Whether the driver limits memory is unknown", "pciAddress", g.PCIAddress, "reason", err)
			r.err = nil
		}
		return supported, known
	})
}

// LimitMemory limits how many bytes of the GPU's memory the processes of a cgroup have together: hard at most, of which soft are
// kept for them. Then it reads the limits back, and fails if they are others.
//
// The error wraps gpu.ErrNotFound if the GPU at the address has another UUID.
func (c *Client) LimitMemory(ctx context.Context, pciAddress, uuid, cgroup string, soft, hard uint64) error {
	err := c.on(ctx, pciAddress, func(r *reading) {
		dev := r.device(uuid)
		r.change(setMemoryLimits, func() nvml.Return { return dev.SetMemoryLimits_v1(cgroup, soft, hard) })
		is := must(r, getMemoryLimits, func() (nvml.MemoryLimits_v1, nvml.Return) { return dev.GetMemoryLimits_v1(cgroup) })
		if is.SoftLimit != soft || is.HardLimit != hard {
			r.fail(setMemoryLimits, nil, fmt.Sprintf("answered success, but the limits are %d and %d bytes instead of %d and %d",
				is.SoftLimit, is.HardLimit, soft, hard))
		}
	})
	if err != nil {
		return fmt.Errorf("limit cgroup %s: %w", cgroup, err)
	}
	return nil
}
