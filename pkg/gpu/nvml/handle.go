// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// handle is what is kept of one GPU: NVML's handle, and the profiles, which do
// not change while the driver runs. Finding a handle anew can take seconds when
// many processes ask at once.
type handle struct {
	pci  string
	lane *lane
	dev  nvml.Device

	// mu is not held during calls, which may hang.
	mu sync.Mutex
	gi []instanceProfile
	ci map[uint32][]nvml.ComputeInstanceProfileInfo // by GPU instance profile id
}

// onGPU runs f on the GPU. If a cached handle turns out to be stale, for
// example after a reset, f runs again on a new one; so whatever f does before
// it meets a stale handle must be repeatable.
func (c *Client) onGPU(ctx context.Context, pci string, f func(*handle) error) error {
	h, cached, err := c.handle(ctx, pci)
	if err != nil {
		return err
	}
	err = f(h)
	if !cached || !maybeStale(err) {
		return err
	}
	c.forget(h)
	fresh, _, findErr := c.handle(ctx, pci)
	if findErr != nil {
		return errors.Join(err, findErr)
	}
	if fresh.dev == h.dev {
		return err // the handle was good, the refusal is meant
	}
	return f(fresh)
}

// maybeStale tells whether an error may come from an outdated handle.
func maybeStale(err error) bool {
	return errors.Is(err, gpu.ErrInvalid) || errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrDriverNotLoaded)
}

func (c *Client) handle(ctx context.Context, pci string) (h *handle, cached bool, err error) {
	lib, err := c.session()
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	h = c.handles[pci]
	c.mu.Unlock()
	if h != nil {
		return h, true, nil
	}
	dev, err := get(ctx, c.gpuLane(pci), "nvmlDeviceGetHandleByPciBusId_v2", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByPciBusId(pci)
	})
	if err != nil {
		return nil, false, err
	}
	return c.remember(pci, dev), false, nil
}

// remember caches the GPU's handle, with the profiles that are known already
// if it is the one that was cached.
func (c *Client) remember(pci string, dev nvml.Device) *handle {
	fresh := &handle{pci: pci, lane: c.gpuLane(pci), dev: dev, ci: map[uint32][]nvml.ComputeInstanceProfileInfo{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handles == nil {
		return fresh // closed meanwhile
	}
	if h := c.handles[pci]; h != nil && h.dev == dev {
		return h
	}
	c.handles[pci] = fresh
	return fresh
}

// forget drops h unless another one has taken its place.
func (c *Client) forget(h *handle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handles[h.pci] == h {
		delete(c.handles, h.pci)
	}
}
