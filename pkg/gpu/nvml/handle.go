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
	pci string
	dev nvml.Device

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
	dev, err := get(ctx, "nvmlDeviceGetHandleByPciBusId_v2", pci, func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByPciBusId(pci)
	})
	if err != nil {
		return nil, false, err
	}
	return c.remember(pci, dev), false, nil
}

// remember caches a new handle for the GPU.
func (c *Client) remember(pci string, dev nvml.Device) *handle {
	h := &handle{pci: pci, dev: dev, ci: map[uint32][]nvml.ComputeInstanceProfileInfo{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handles != nil { // nil: closed meanwhile
		c.handles[pci] = h
	}
	return h
}

// forget drops h unless another one has taken its place.
func (c *Client) forget(h *handle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handles[h.pci] == h {
		delete(c.handles, h.pci)
	}
}
