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

	"github.com/NVIDIA/go-nvml/pkg/nvml"
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
	place, err := call.Read(ctx, c.calls.Of(pci, "sysfs"), "read the device's files", func() (gpu.GPU, error) { return place(c.roots.Sys, pci) })
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

// Removed reports whether somebody has taken a GPU out: the kernel has no device at
// its PCI address any more, or has given it to another driver, such as vfio-pci. A GPU
// that has fallen off the bus is still there.
func (c *Client) Removed(pciAddress string) bool {
	gone, err := call.Read(context.Background(), c.calls.Of(pciAddress, "sysfs"), "read the device's files", func() (bool, error) {
		path := filepath.Join(c.roots.Sys, "bus/pci/devices", pciAddress)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return true, nil
		}
		driver, err := os.Readlink(filepath.Join(path, "driver")) // none if no driver has it
		return filepath.Base(driver) != "nvidia", err
	})
	return err == nil && gone
}

// readNVLink reads what the GPU's NVLinks lead to, once: wires stay where they are until somebody
// resets the GPU. What cannot be read now stays unknown until the next discovery: only requests for
// linked GPUs depend on it. So it gets no more time than one call that is not slow, and none while an earlier one is out. It has
// a queue of its own, as links that hang are no reason to do without the GPU. One that hangs altogether is found by any other call.
func (c *Client) readNVLink(ctx context.Context, h *handle, g *gpu.GPU) {
	g.NVLink = cached(&h.nvlink, func() (links *gpu.NVLink, known bool) {
		calls := c.calls.Of(h.pci, "NVLinks")
		if calls.Pending() != nil || g.MIG != nil && g.MIG.Enabled {
			return nil, false
		}
		limited, cancel := context.WithTimeout(ctx, call.SlowAfter)
		defer cancel()
		r := &reading{handle: h, ctx: limited, queue: queue{calls, h.lib, c.observe}}
		links = readLinks(r)
		if r.err == nil || errors.Is(r.err, gpu.ErrNotSupported) {
			return links, links != nil
		}
		klog.FromContext(ctx).V(2).Info("What the NVLinks lead to is unknown", "pciAddress", g.PCIAddress, "reason", r.err)
		return nil, false
	})
}

// readLinks returns nil for a GPU without an active link, or one that is not registered with the fabric
// that it belongs to: what it reaches is not settled yet.
func readLinks(r *reading) *gpu.NVLink {
	// A GPU without NVLink says so at the first link.
	_ = must(r, "nvmlDeviceGetNvLinkState", r.linkState(0))
	fabric, known := readFabricInfo(r)
	switch {
	case r.err != nil:
		return nil
	case !known, fabric.State == nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
	case fabric.State != nvml.GPU_FABRIC_STATE_COMPLETED || fabric.Status != uint32(nvml.SUCCESS):
		return nil
	case fabric.ClusterUuid != [16]uint8{}:
		id := fabric.ClusterUuid
		return &gpu.NVLink{Clique: fmt.Sprintf("%x-%x-%x-%x-%x.%d", id[:4], id[4:6], id[6:8], id[8:10], id[10:], fabric.CliqueId)}
	}
	var links gpu.NVLink
	for link := 0; link < nvml.NVLINK_MAX_LINKS && r.err == nil; link++ {
		state, _ := ask(r, "nvmlDeviceGetNvLinkState", r.linkState(link))
		if errors.Is(r.err, gpu.ErrInvalid) {
			r.err = nil // the GPU has fewer
			break
		}
		if state == nvml.FEATURE_ENABLED {
			readLinkEnd(r, link, &links)
		}
	}
	if r.err != nil || len(links.GPUs)+len(links.Switches) == 0 {
		return nil
	}
	return &gpu.NVLink{GPUs: gpu.SortPCIAddresses(links.GPUs), Switches: gpu.SortPCIAddresses(links.Switches)}
}

func (h *handle) linkState(link int) func() (nvml.EnableState, nvml.Return) {
	return func() (nvml.EnableState, nvml.Return) { return h.dev.GetNvLinkState(link) }
}

// readLinkEnd adds what an active link leads to.
func readLinkEnd(r *reading, link int, links *gpu.NVLink) {
	// Where the type is not supported the zero value counts, a GPU.
	kind, _ := ask(r, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (nvml.IntNvLinkDeviceType, nvml.Return) {
		return r.dev.GetNvLinkRemoteDeviceType(link)
	})
	info, _ := ask(r, "nvmlDeviceGetNvLinkRemotePciInfo_v2", func() (nvml.PciInfo, nvml.Return) {
		return r.dev.GetNvLinkRemotePciInfo(link)
	})
	address, err := pciAddress(cString(info.BusId[:]))
	switch {
	case r.err != nil:
	case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH && err != nil: // one that this machine does not see has no address
		links.Switches = append(links.Switches, gpu.UnknownSwitch)
	case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH:
		links.Switches = append(links.Switches, address)
	case err == nil:
		links.GPUs = append(links.GPUs, address)
	}
}

// readFabricInfo reads the GPU's registration with the NVLink fabric. The second version of the
// structure has all that is needed, and every driver with the function has it.
func readFabricInfo(r *reading) (info nvml.GpuFabricInfo_v2, known bool) {
	return ask(r, "nvmlDeviceGetGpuFabricInfoV", func() (nvml.GpuFabricInfo_v2, nvml.Return) {
		return r.dev.GetGpuFabricInfoV().V2()
	})
}
