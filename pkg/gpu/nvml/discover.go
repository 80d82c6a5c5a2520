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
	"github.com/partage-dev/partage/pkg/node/host"
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
	r := &reading{ctx: ctx, queue: c.driver(lib)}
	node.DriverVersion = must(r, "nvmlSystemGetDriverVersion", lib.SystemGetDriverVersion)
	cuda, _ := ask(r, "nvmlSystemGetCudaDriverVersion_v2", lib.SystemGetCudaDriverVersion_v2)
	node.CUDAVersion = gpu.Version{Major: cuda / 1000, Minor: cuda % 1000 / 10}
	count := must(r, "nvmlDeviceGetCount_v2", lib.DeviceGetCount)
	if r.err != nil {
		return nil, r.err
	}
	gpus, errs := make([]gpu.GPU, count), make([]error, count)
	var reading sync.WaitGroup
	for index := range count {
		gpus[index].PCIAddress = lib.earlier(index)
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
		node.Broken = append(node.Broken, gpu.Broken{Index: index, PCIAddress: g.PCIAddress, Reason: err.Error(), Err: err})
	}
	slices.SortFunc(node.GPUs, func(a, b gpu.GPU) int { return cmp.Compare(a.PCIAddress, b.PCIAddress) })
	return node, nil
}

// discoverGPU returns what it could read even if it fails. It reads the PCI address
// first.
func (c *Client) discoverGPU(ctx context.Context, lib *library, index int) (gpu.GPU, error) {
	h, g, err := c.locate(ctx, lib, index)
	if err != nil {
		return g, fmt.Errorf("GPU with index %d: %w", index, err)
	}
	r := c.reading(ctx, h)
	g.UUID = must(r, "nvmlDeviceGetUUID", h.dev.GetUUID)
	g.Minor = must(r, "nvmlDeviceGetMinorNumber", h.dev.GetMinorNumber)
	readProduct(r, &g)
	if mode, known := ask(r, "nvmlDeviceGetAddressingMode", h.dev.GetAddressingMode); known {
		g.AddressingMode = addressingModes[mode.Value]
	}
	readMIG(r, &g)
	// While MIG is on the driver does not say what it keeps of the undivided GPU: what it keeps then is for partitions.
	if g.MIG == nil || !g.MIG.Enabled {
		memory, _ := ask(r, "nvmlDeviceGetMemoryInfo_v2", h.dev.GetMemoryInfo_v2)
		g.ReservedBytes = memory.Reserved
	}
	readCoherence(r, c.roots, &g)
	readMemoryLimits(r, c.roots, &g)
	if r.err == nil {
		r.err = lib.checkProfiles(&g)
	}
	if r.err != nil {
		return g, r.err
	}
	c.readPlace(ctx, &g)
	c.readNVLink(ctx, h, &g)
	return g, nil
}

// readProduct reads what describes a GPU. What the driver does not support for this
// model stays empty.
func readProduct(r *reading, g *gpu.GPU) {
	g.ProductName, _ = ask(r, "nvmlDeviceGetName", r.dev.GetName)
	brand, _ := ask(r, "nvmlDeviceGetBrand", r.dev.GetBrand)
	g.Brand = cmp.Or(brands[brand], unknown)
	arch, _ := ask(r, "nvmlDeviceGetArchitecture", r.dev.GetArchitecture)
	g.Architecture = cmp.Or(architectures[arch], unknown) // one that is newer than this code
	g.ComputeCapability, _ = ask(r, "nvmlDeviceGetCudaComputeCapability", func() (gpu.Version, nvml.Return) {
		major, minor, ret := r.dev.GetCudaComputeCapability()
		return gpu.Version{Major: major, Minor: minor}, ret
	})
	// GPUs that share the host's memory have none of their own to report.
	memory, _ := ask(r, "nvmlDeviceGetMemoryInfo", r.dev.GetMemoryInfo)
	g.Resources.MemoryBytes = memory.Total
}

// readCoherence reads who manages the memory of a GPU that is coherent with the CPU, once: it stays so
// until the driver is loaded again. What cannot be read now is unknown until the next discovery. A file that
// hangs is no reason to do without the GPU.
func readCoherence(r *reading, roots host.Roots, g *gpu.GPU) {
	g.CoherentMemory = cached(&r.coherentMemory, func() (gpu.CoherentMemory, bool) {
		if !isCoherent(r, g) {
			return "", false
		}
		switch managed, err := roots.Within(r.ctx).DriverManagesMemory(); {
		case err != nil:
			klog.FromContext(r.ctx).Error(err, "Who manages the memory of a coherent GPU is unknown", "pciAddress", g.PCIAddress)
			return gpu.CoherentUnknown, false
		case managed:
			return gpu.CoherentDriver, true
		}
		return "", true
	})
}

// isCoherent reports whether the GPU has a coherent link to the CPU. A machine can have GPUs of both
// kinds. Only a call that does not return is an error.
func isCoherent(r *reading, g *gpu.GPU) bool {
	if g.AddressingMode == addressingModes[uint32(nvml.DEVICE_ADDRESSING_MODE_ATS)] {
		return true
	}
	failed := r.err
	link := must(r, "nvmlDeviceGetC2cModeInfoV", func() (nvml.C2cModeInfo_v1, nvml.Return) { return r.dev.GetC2cModeInfoV().V1() })
	if !gpu.IsPending(r.err) {
		r.err = failed
	}
	return link.IsC2cEnabled != 0
}

// Facts are what a report says of a GPU beside what Discover reads: nothing is decided by
// them. What the library or the GPU does not support is nil.
type Facts struct {
	// Persistence is true where the driver stays initialised without clients.
	Persistence *bool `json:"persistence,omitempty"`
	// ReservedBytes is the part of the memory that the driver keeps for itself.
	ReservedBytes *uint64 `json:"reservedBytes,omitempty"`
	// UsedBytes is what programs have of the memory.
	UsedBytes *uint64 `json:"usedBytes,omitempty"`
	// ECC is true where the memory's errors are corrected.
	ECC *bool `json:"ecc,omitempty"`
	// Cores is the number of CUDA cores.
	Cores *int `json:"cores,omitempty"`
}

// Facts reads them. It changes nothing.
func (c *Client) Facts(ctx context.Context, pciAddress string) (Facts, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (facts Facts) {
		facts.Persistence = known(r, "nvmlDeviceGetPersistenceMode", func() (bool, nvml.Return) {
			mode, ret := r.dev.GetPersistenceMode()
			return mode == nvml.FEATURE_ENABLED, ret
		})
		if memory := known(r, "nvmlDeviceGetMemoryInfo_v2", r.dev.GetMemoryInfo_v2); memory != nil {
			facts.ReservedBytes, facts.UsedBytes = &memory.Reserved, &memory.Used
		}
		facts.ECC = known(r, "nvmlDeviceGetEccMode", func() (bool, nvml.Return) {
			mode, _, ret := r.dev.GetEccMode()
			return mode == nvml.FEATURE_ENABLED, ret
		})
		facts.Cores = known(r, "nvmlDeviceGetNumGpuCores", r.dev.GetNumGpuCores)
		return facts
	})
}
