// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

// readPlace reads where the GPU is in the host's topology, from sysfs. NVML's NUMA
// function is about something else, the node of the GPU's memory on coherent
// platforms. What sysfs does not have stays empty.
func (c *Client) readPlace(ctx context.Context, g *gpu.GPU) {
	pci := g.PCIAddress
	place, err := call.Look(ctx, c.calls.Of(pci, "sysfs"), "look at the device", func() (gpu.GPU, error) { return place(c.roots.Sys, pci) })
	g.PCIeRoot, g.PCIeSwitch, g.NUMANode = place.PCIeRoot, place.PCIeSwitch, place.NUMANode
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The place of a GPU in the machine is not known in full", "pciAddress", pci, "reason", err)
	}
}

// place returns what is known of it, and why something is not.
func place(sysRoot, pci string) (g gpu.GPU, err error) {
	sysfs := deviceattribute.WithFSFromRoot(sysRoot)
	root, rootErr := deviceattribute.GetPCIeRootAttributeByPCIBusID(pci, sysfs)
	if root.Value.StringValue != nil {
		g.PCIeRoot = *root.Value.StringValue
	}
	var switchErr error
	g.PCIeSwitch, switchErr = pcieSwitch(sysRoot, pci)
	numa, numaErr := deviceattribute.GetNUMANodeAttributeByPCIBusID(pci, deviceattribute.ScalarAttribute, sysfs)
	if numa.Value.IntValue != nil {
		g.NUMANode = new(int(*numa.Value.IntValue))
	}
	return g, errors.Join(rootErr, switchErr, numaErr)
}

// pcieSwitch returns the upstream port of the PCIe switch that a device is behind, the one next
// to the root complex, or "". The path of a device in sysfs is that of the bridges above it: the root
// complex, its root port, and for each switch the upstream port and a downstream port.
func pcieSwitch(sysRoot, pciAddress string) (string, error) {
	target, err := os.Readlink(filepath.Join(sysRoot, "bus/pci/devices", pciAddress))
	if err != nil {
		return "", fmt.Errorf("find PCI device %s in sysfs: %w", pciAddress, err)
	}
	above := strings.Split(target, "/")
	// The last one counts: some machines have a root complex below other devices, even below another one.
	root := len(above) - 1
	for root >= 0 && !strings.HasPrefix(above[root], "pci") {
		root--
	}
	if root < 0 {
		return "", fmt.Errorf("PCI device %s is at %s, which is not below a root complex", pciAddress, target)
	}
	const upstream, needed = 2, 5
	if above = above[root:]; len(above) < needed {
		return "", nil
	}
	return above[upstream], nil
}

// kernelDriver is the name of NVIDIA's driver for PCI devices.
const kernelDriver = "nvidia"

// Removed reports whether somebody has taken a GPU out: the kernel has no device at
// its PCI address any more, or has given it to another driver, such as vfio-pci. A GPU
// that has fallen off the bus is still there.
func (c *Client) Removed(pciAddress string) bool {
	gone, err := call.Look(context.Background(), c.calls.Of(pciAddress, "sysfs"), "look at the device", func() (bool, error) {
		return removed(filepath.Join(c.roots.Sys, "bus/pci/devices", pciAddress)), nil
	})
	return err == nil && gone
}

func removed(path string) bool {
	if _, err := os.Stat(path); err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	driver, err := os.Readlink(filepath.Join(path, "driver"))
	return err == nil && filepath.Base(driver) != kernelDriver
}
