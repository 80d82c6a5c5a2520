// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// handle is what is cached of one GPU: NVML's handle, and the profiles and NVLinks, which do not
// change while the driver runs. Looking a handle up can take seconds when many
// processes do it at once.
type handle struct {
	pci   string
	queue queue
	dev   nvml.Device

	// mu is not held during calls, which may hang.
	mu sync.Mutex
	gi []instanceProfile
	ci map[uint32][]nvml.ComputeInstanceProfileInfo // by GPU instance profile id
	// gpm says whether partitions tell how busy they are, nil before that was asked.
	gpm     *bool
	samples []gpmSample
	// nvlink is what the links lead to, nil before that was read.
	nvlink *gpu.NVLink
	// linksOut is a call about the links that nobody waited for any more, or nil.
	linksOut *gpu.PendingError
	// coherentMemory is who manages the GPU's memory if it is coherent, nil before that was read.
	coherentMemory *gpu.CoherentMemory
}

// onGPU runs f on the GPU. If a cached handle turns out to be stale, for example
// after a reset, f runs again on a new one; so what f does before it meets a stale
// handle must be repeatable.
func (s *session) onGPU(ctx context.Context, pci string, f func(*handle) error) error {
	h, cached, err := s.handle(ctx, pci)
	if err != nil {
		return err
	}
	err = f(h)
	if !cached || !maybeStale(err) {
		return err
	}
	s.forget(h)
	fresh, _, findErr := s.handle(ctx, pci)
	if findErr != nil {
		return errors.Join(err, findErr)
	}
	if fresh.dev == h.dev {
		return err // the handle was good, the refusal is meant
	}
	return f(fresh)
}

// maybeStale reports whether an error may come from a stale handle.
func maybeStale(err error) bool {
	return errors.Is(err, gpu.ErrInvalid) || errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrDriverNotLoaded)
}

func (s *session) handle(ctx context.Context, pci string) (h *handle, cached bool, err error) {
	lib, err := s.library()
	if err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	h = s.handles[pci]
	s.mu.Unlock()
	if h != nil {
		return h, true, nil
	}
	dev, err := get(ctx, s.queue(pci), "nvmlDeviceGetHandleByPciBusId_v2", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByPciBusId(pci)
	})
	if err != nil {
		return nil, false, err
	}
	return s.remember(pci, dev), false, nil
}

// remember caches the GPU's handle. If the handle was cached before, it keeps the
// profiles that are known of it.
func (s *session) remember(pci string, dev nvml.Device) *handle {
	fresh := &handle{pci: pci, queue: s.queue(pci), dev: dev, ci: map[uint32][]nvml.ComputeInstanceProfileInfo{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handles == nil {
		return fresh // closed meanwhile
	}
	if h := s.handles[pci]; h != nil && h.dev == dev {
		return h
	}
	s.handles[pci] = fresh
	return fresh
}

// forget drops h unless another one has taken its place.
func (s *session) forget(h *handle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.handles[h.pci] == h {
		delete(s.handles, h.pci)
	}
}

// checkProfiles refuses a GPU that had more MIG profiles earlier in this session: a
// driver in trouble answers NOT_SUPPORTED, and allocated devices would no longer be
// published.
func (s *session) checkProfiles(g *gpu.GPU) error {
	now := 0
	if g.MIG != nil {
		now = len(g.MIG.Profiles)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if before := s.profiles[g.PCIAddress]; now < before {
		return &gpu.Error{
			Call: "nvmlDeviceGetMigMode and nvmlDeviceGetGpuInstancePossiblePlacements_v2", PCIAddress: g.PCIAddress,
			Text: fmt.Sprintf("%d MIG profiles are supported, %d were earlier", now, before),
		}
	}
	if s.profiles != nil {
		s.profiles[g.PCIAddress] = now
	}
	return nil
}

// locate returns the GPU with this index, and its handle. If it fails it returns the
// address that was found earlier, if there is one.
func (s *session) locate(ctx context.Context, lib nvml.Interface, index int) (nvml.Device, gpu.GPU, error) {
	q := s.byIndex(index)
	earlier := gpu.GPU{PCIAddress: q.PCIAddress()}
	dev, err := get(ctx, q, "nvmlDeviceGetHandleByIndex_v2", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByIndex(index)
	})
	if err != nil {
		return nil, earlier, err
	}
	info, err := get(ctx, q, "nvmlDeviceGetPciInfo_v3", dev.GetPciInfo)
	if err != nil {
		return nil, earlier, err
	}
	pci, err := pciAddress(cString(info.BusId[:]))
	if err != nil {
		return nil, earlier, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addresses != nil { // nil: closed meanwhile
		s.addresses[index] = pci
	}
	return dev, gpu.GPU{PCIAddress: pci, PCIDeviceID: pciDeviceID(info.PciDeviceId)}, nil
}

// byIndex returns the queue for looking up the GPU with this index: the GPU's own
// if the index was looked up before in this session, in which indexes do not move.
// It is never the driver's: a GPU that cannot even be looked up would then hide all.
func (s *session) byIndex(index int) queue {
	s.mu.Lock()
	pci := s.addresses[index]
	s.mu.Unlock()
	if pci != "" {
		return s.queue(pci)
	}
	return queue{s.calls.Of("", fmt.Sprintf("index %d", index)), s.observe}
}
