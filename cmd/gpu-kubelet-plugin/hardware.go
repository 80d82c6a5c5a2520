// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/node/host"
)

// hardware is the NVML session. It also notices that a driver installed later needs a new
// process.
type hardware struct {
	*nvml.Client
	specs *cdi.Specs
	roots host.Roots
	// memoryLimits is false where the driver is not to limit memory.
	memoryLimits bool
	// noGPUs says that there is no driver because the machine has no GPUs.
	noGPUs bool
}

func (h *hardware) Open(ctx context.Context) error {
	err := h.Client.Open(ctx)
	if h.lacksGPUs(ctx, err) {
		return nil
	}
	switch {
	case err == nil:
		h.warnOfMissingNodes(ctx)
	case errors.Is(err, nvml.ErrRestartRequired):
		return fmt.Errorf("%w: %w", plugin.ErrStop, err)
	case errors.Is(err, gpu.ErrDriverNotLoaded):
		return h.onHost(err)
	}
	return err
}

// warnOfMissingNodes logs what the first claim would fail for: NVML makes the nodes
// that it needs, so GPUs are found without the others.
func (h *hardware) warnOfMissingNodes(ctx context.Context) {
	for _, path := range host.RequiredNodes() {
		if _, err := h.roots.Node(path); err != nil {
			klog.FromContext(ctx).Error(err, "GPUs can be found, and no claim can be prepared yet")
		}
	}
}

// lacksGPUs reports whether the driver is missing where there is nothing to drive. Such
// a node is in order: nothing is published, and the plugin is ready.
func (h *hardware) lacksGPUs(ctx context.Context, err error) bool {
	before := h.noGPUs
	h.noGPUs = false
	if errors.Is(err, gpu.ErrDriverNotLoaded) {
		// Where the PCI bus cannot be read it is not known that there are none.
		gpus, unknown := h.roots.Within(ctx).NVIDIAGPUs()
		h.noGPUs = unknown == nil && len(gpus) == 0
	}
	if h.noGPUs && !before {
		klog.FromContext(ctx).Info("This machine has neither an NVIDIA GPU nor the driver, nothing is published", "reason", err)
	}
	return h.noGPUs
}

// onHost adds the driver root's path on the host, since people know that and not the
// one in this container.
func (h *hardware) onHost(err error) error {
	if h.roots.HostDriver == h.roots.Driver {
		return err
	}
	return fmt.Errorf("%w (driver root %s is %s on the host)", err, h.roots.Driver, h.roots.HostDriver)
}

// Discover also gives the driver's version to the CDI specs.
func (h *hardware) Discover(ctx context.Context) (*gpu.Node, error) {
	if h.noGPUs {
		return &gpu.Node{}, nil
	}
	node, err := h.Client.Discover(ctx)
	if err != nil {
		return nil, err
	}
	h.specs.SetDriverVersion(node.DriverVersion)
	for i := range node.GPUs {
		node.GPUs[i].MemoryLimits = node.GPUs[i].MemoryLimits && h.memoryLimits
	}
	node.Unlisted = unlisted(h.roots.Within(ctx), node)
	return node, nil
}

// unlisted returns the GPUs on the PCI bus that the driver does not list. There are none where
// the bus cannot be read, or where one that is listed does not even tell its address.
func unlisted(roots host.Roots, node *gpu.Node) []string {
	onBus, err := roots.NVIDIAGPUs()
	if err != nil {
		return nil
	}
	listed := map[string]bool{}
	for i := range node.GPUs {
		listed[node.GPUs[i].PCIAddress] = true
	}
	for _, b := range node.Broken {
		if b.PCIAddress == "" {
			return nil
		}
		listed[b.PCIAddress] = true
	}
	return slices.DeleteFunc(onBus, func(address string) bool { return listed[address] })
}
