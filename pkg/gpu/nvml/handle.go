// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// handle is what is cached of one GPU: NVML's handle, and what does not change while the driver
// runs, nil until it was read. Looking a handle up can take seconds when many processes do it at once.
type handle struct {
	lib *library
	pci string
	dev nvml.Device

	instanceProfiles atomic.Pointer[[]*instanceProfile]
	coherentMemory   atomic.Pointer[gpu.CoherentMemory]
	memoryLimits     atomic.Pointer[bool]
	// nvlink is what the links lead to.
	nvlink atomic.Pointer[*gpu.NVLink]
	// samples are for Usage alone.
	samples map[gpu.PartitionID]nvml.GpmSample
}

// cached returns what is kept, or reads it, and keeps what is known now.
func cached[T any](kept *atomic.Pointer[T], read func() (value T, known bool)) T {
	if value := kept.Load(); value != nil {
		return *value
	}
	value, known := read()
	if known {
		kept.Store(&value)
	}
	return value
}

// onGPU runs f on the GPU. If a cached handle turns out to be stale, for example
// after a reset, f runs again on a new one; so what f does before it meets a stale
// handle must be repeatable.
func onGPU[T any](ctx context.Context, s *session, pci string, f func(*reading) T) (value T, err error) {
	h, cached, err := s.handle(ctx, pci)
	if err != nil {
		return value, err
	}
	r := s.reading(ctx, h)
	value = f(r)
	if !cached || !maybeStale(r.err) {
		return value, r.err
	}
	h.lib.forget(h)
	fresh, _, err := s.handle(ctx, pci)
	switch {
	case err != nil:
		return value, errors.Join(r.err, err)
	case fresh.dev == h.dev:
		return value, r.err // the handle was good, the refusal is meant
	}
	r = s.reading(ctx, fresh)
	value = f(r)
	return value, r.err
}

// on is onGPU for what returns nothing.
func (s *session) on(ctx context.Context, pci string, f func(*reading)) error {
	_, err := onGPU(ctx, s, pci, func(r *reading) (none struct{}) {
		f(r)
		return none
	})
	return err
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
	lib.mu.Lock()
	h = lib.handles[pci]
	lib.mu.Unlock()
	if h != nil {
		return h, true, nil
	}
	dev, err := get(ctx, queue{s.calls.GPU(pci), lib, s.observe}, "nvmlDeviceGetHandleByPciBusId_v2", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByPciBusId(pci)
	})
	if err != nil {
		return nil, false, err
	}
	return lib.remember(pci, dev), false, nil
}

// remember caches the GPU's handle. If the handle was cached before, it keeps what is known of it.
func (l *library) remember(pci string, dev nvml.Device) *handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.handles[pci]
	if h == nil || h.dev != dev {
		h = &handle{lib: l, pci: pci, dev: dev, samples: map[gpu.PartitionID]nvml.GpmSample{}}
		l.handles[pci] = h
	}
	return h
}

// forget drops h unless another one has taken its place.
func (l *library) forget(h *handle) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handles[h.pci] == h {
		delete(l.handles, h.pci)
	}
}

// checkProfiles refuses a GPU that had more MIG profiles earlier in this session, or the driver's names for them: a
// driver in trouble answers NOT_SUPPORTED, and allocated devices would no longer be
// published.
func (l *library) checkProfiles(g *gpu.GPU) error {
	var now []gpu.Profile
	if g.MIG != nil {
		now = g.MIG.Profiles
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.profiles[g.PCIAddress]
	named := func(all []gpu.Profile) int {
		return len(slices.DeleteFunc(slices.Clone(all), func(p gpu.Profile) bool { return p.Name == withoutName(p.Slices, p.ID) }))
	}
	if len(now) < len(before) || named(now) < named(before) {
		return &gpu.Error{
			Call: "nvmlDeviceGetMigMode, nvmlDeviceGetGpuInstancePossiblePlacements_v2 and nvmlDeviceGetGpuInstanceProfileInfoV", PCIAddress: g.PCIAddress,
			Text: fmt.Sprintf("%d MIG profiles are supported and %d of them named, %d and %d were earlier", len(now), named(now), len(before), named(before)),
		}
	}
	l.profiles[g.PCIAddress] = now
	return nil
}

// earlier is the address at which a GPU was found earlier in this session, in which indexes do not move, or "".
func (l *library) earlier(index int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.addresses[index]
}

// locate returns the GPU with this index, and its handle. If it fails it returns the
// address that was found earlier, if there is one.
func (s *session) locate(ctx context.Context, lib *library, index int) (*handle, gpu.GPU, error) {
	g := gpu.GPU{PCIAddress: lib.earlier(index)}
	// It is never the driver's queue: a GPU that cannot even be looked up would then hide all.
	calls := s.calls.GPU(g.PCIAddress)
	if g.PCIAddress == "" {
		calls = s.calls.Of("", fmt.Sprintf("index %d", index))
	}
	r := &reading{ctx: ctx, queue: queue{calls, lib, s.observe}}
	dev := must(r, "nvmlDeviceGetHandleByIndex_v2", func() (nvml.Device, nvml.Return) {
		return lib.DeviceGetHandleByIndex(index)
	})
	info := must(r, "nvmlDeviceGetPciInfo_v3", func() (nvml.PciInfo, nvml.Return) { return dev.GetPciInfo() })
	if r.err != nil {
		return nil, g, r.err
	}
	pci, err := pciAddress(cString(info.BusId[:]))
	if err != nil {
		return nil, g, err
	}
	lib.mu.Lock()
	lib.addresses[index] = pci
	lib.mu.Unlock()
	return lib.remember(pci, dev), gpu.GPU{PCIAddress: pci, PCIDeviceID: pciDeviceID(info.PciDeviceId)}, nil
}
