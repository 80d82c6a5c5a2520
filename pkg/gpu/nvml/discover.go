// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Discover reads everything about all GPUs. A GPU that does not answer is listed in
// Node.Broken, and the others are returned; an error is about the node as a whole.
// Discover reads about 50 values per MIG-capable GPU, once also three for each NVLink,
// and changes nothing. It reads the GPUs concurrently, so that any number of them that
// hang cost no more time than one.
func (c *Client) Discover(ctx context.Context) (*gpu.Node, error) {
	lib, err := c.library()
	if err != nil {
		return nil, err
	}
	node := &gpu.Node{GPUs: []gpu.GPU{}}
	node.DriverVersion, err = get(ctx, c.driver(), "nvmlSystemGetDriverVersion", lib.SystemGetDriverVersion)
	if err != nil {
		return nil, err
	}
	cuda, err := optional(get(ctx, c.driver(), "nvmlSystemGetCudaDriverVersion_v2", lib.SystemGetCudaDriverVersion_v2))
	if err != nil {
		return nil, err
	}
	node.CUDAVersion = gpu.Version{Major: cuda / 1000, Minor: cuda % 1000 / 10}

	count, err := get(ctx, c.driver(), "nvmlDeviceGetCount_v2", lib.DeviceGetCount)
	if err != nil {
		return nil, err
	}
	gpus, errs := make([]gpu.GPU, count), make([]error, count)
	var reading sync.WaitGroup
	for index := range count {
		gpus[index].PCIAddress = c.byIndex(index).PCIAddress() // what was found earlier
		reading.Go(func() {
			defer c.panics.Recover(ctx, &errs[index])
			gpus[index], errs[index] = c.discoverGPU(ctx, lib, index)
		})
	}
	reading.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("discover GPUs: %w", ctx.Err())
	}
	for index, err := range errs {
		g := gpus[index]
		if err == nil {
			node.GPUs = append(node.GPUs, g)
			continue
		}
		klog.FromContext(ctx).V(4).Info("GPU does not answer", "index", index, "pciAddress", g.PCIAddress, "reason", err)
		node.Broken = append(node.Broken, gpu.Broken{
			Index: index, PCIAddress: g.PCIAddress, Reason: err.Error(), Err: err,
		})
	}
	slices.SortFunc(node.GPUs, func(a, b gpu.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
	return node, nil
}

// discoverGPU returns what it could read even if it fails. It reads the PCI address
// first.
func (c *Client) discoverGPU(ctx context.Context, lib nvml.Interface, index int) (gpu.GPU, error) {
	dev, g, err := c.locate(ctx, lib, index)
	if err != nil {
		return g, fmt.Errorf("GPU with index %d: %w", index, err)
	}
	h := c.remember(g.PCIAddress, dev)
	for _, read := range []func(context.Context, *handle, *gpu.GPU) error{
		readIdentity, readProduct, c.readAddressingMode, readMIG(c.features()), c.readReservedMemory, c.readCoherence,
	} {
		if err := read(ctx, h, &g); err != nil {
			return g, err
		}
	}
	if err := c.checkProfiles(&g); err != nil {
		return g, err
	}
	c.readPlace(ctx, &g)
	c.readNVLink(ctx, h, &g)
	return g, nil
}

// readIdentity reads what is needed to use a GPU at all.
func readIdentity(ctx context.Context, h *handle, g *gpu.GPU) (err error) {
	if g.UUID, err = get(ctx, h.queue, "nvmlDeviceGetUUID", h.dev.GetUUID); err != nil {
		return err
	}
	g.Minor, err = get(ctx, h.queue, "nvmlDeviceGetMinorNumber", h.dev.GetMinorNumber)
	return err
}

// readProduct reads what describes a GPU. What the driver does not support for this
// model stays empty.
func readProduct(ctx context.Context, h *handle, g *gpu.GPU) error {
	var err error
	if g.ProductName, err = optional(get(ctx, h.queue, "nvmlDeviceGetName", h.dev.GetName)); err != nil {
		return err
	}
	arch, err := optional(get(ctx, h.queue, "nvmlDeviceGetArchitecture", h.dev.GetArchitecture))
	if err != nil {
		return err
	}
	g.Architecture = nameOf(architectures, arch)

	g.ComputeCapability, err = optional(get(ctx, h.queue, "nvmlDeviceGetCudaComputeCapability",
		func() (gpu.Version, nvml.Return) {
			major, minor, ret := h.dev.GetCudaComputeCapability()
			return gpu.Version{Major: major, Minor: minor}, ret
		}))
	if err != nil {
		return err
	}
	// GPUs that share the host's memory have none of their own to report.
	memory, err := optional(get(ctx, h.queue, "nvmlDeviceGetMemoryInfo", h.dev.GetMemoryInfo))
	g.Resources.MemoryBytes = memory.Total
	return err
}

// readReservedMemory reads what the driver keeps of the undivided GPU's memory. It
// does not say so while MIG is on: what it keeps then is for partitions.
func (c *Client) readReservedMemory(ctx context.Context, h *handle, g *gpu.GPU) error {
	if !c.features().reservedMemory || g.MIG != nil && g.MIG.Enabled {
		return nil
	}
	memory, err := optional(get(ctx, h.queue, "nvmlDeviceGetMemoryInfo_v2", h.dev.GetMemoryInfo_v2))
	g.ReservedBytes = memory.Reserved
	return err
}

func (c *Client) readAddressingMode(ctx context.Context, h *handle, g *gpu.GPU) error {
	if !c.features().addressingMode {
		return nil
	}
	mode, err := get(ctx, h.queue, "nvmlDeviceGetAddressingMode", h.dev.GetAddressingMode)
	if err == nil {
		g.AddressingMode = addressingModes[mode.Value]
	}
	_, err = optional(mode, err)
	return err
}

// readCoherence reads who manages the memory of a GPU that is coherent with the CPU, once: it stays so
// until the driver is loaded again. What cannot be read now is unknown until the next discovery. A file that
// hangs is no reason to do without the GPU.
func (c *Client) readCoherence(ctx context.Context, h *handle, g *gpu.GPU) error {
	h.mu.Lock()
	known := h.coherentMemory
	h.mu.Unlock()
	if known != nil {
		g.CoherentMemory = *known
		return nil
	}
	if coherent, err := c.coherent(ctx, h, g); err != nil || !coherent {
		return err
	}
	managed, err := c.roots.Within(ctx).DriverManagesMemory()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Who manages the memory of a coherent GPU is unknown", "pciAddress", g.PCIAddress)
		g.CoherentMemory = gpu.CoherentUnknown
		return nil
	}
	if managed {
		g.CoherentMemory = gpu.CoherentDriver
	}
	memory := g.CoherentMemory
	h.mu.Lock()
	defer h.mu.Unlock()
	h.coherentMemory = &memory
	return nil
}

// coherent reports whether the GPU has a coherent link to the CPU. A machine can have GPUs of both
// kinds. Only a call that does not return is an error.
func (c *Client) coherent(ctx context.Context, h *handle, g *gpu.GPU) (bool, error) {
	if g.AddressingMode == addressingModes[uint32(nvml.DEVICE_ADDRESSING_MODE_ATS)] {
		return true, nil
	}
	if !c.features().c2c {
		return false, nil
	}
	link, err := get(ctx, h.queue, "nvmlDeviceGetC2cModeInfoV", func() (nvml.C2cModeInfo_v1, nvml.Return) { return h.dev.GetC2cModeInfoV().V1() })
	if gpu.IsPending(err) {
		return false, err
	}
	return err == nil && link.IsC2cEnabled != 0, nil
}
