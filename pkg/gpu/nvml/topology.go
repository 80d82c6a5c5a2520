// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/gpu"
)

// readPlace reads where the GPU is in the host's topology, from sysfs. NVML's NUMA
// function is about something else, the node of the GPU's memory on coherent
// platforms. What sysfs does not have stays empty.
func (c *Client) readPlace(ctx context.Context, g *gpu.GPU) {
	before := *g // the look may go on when nobody waits any more
	place, err := call.Look(ctx, c.calls.Of(g.PCIAddress, "sysfs"), "look at the device", func() (gpu.GPU, error) {
		return c.place(ctx, before), nil
	})
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The place of a GPU in the machine is unknown", "pciAddress", g.PCIAddress, "reason", err)
		return
	}
	*g = place
}

// place completes a GPU.
func (c *Client) place(ctx context.Context, g gpu.GPU) gpu.GPU {
	logger := klog.FromContext(ctx).WithValues("pciAddress", g.PCIAddress)
	sysfs := deviceattribute.WithFSFromRoot(c.roots.Sys)

	root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(g.PCIAddress, sysfs)
	if err != nil {
		logger.V(2).Info("PCIe root is unknown", "reason", err)
	} else if root.Value.StringValue != nil {
		g.PCIeRoot = *root.Value.StringValue
	}
	if g.PCIeSwitch, err = pcieSwitch(c.roots.Sys, g.PCIAddress); err != nil {
		logger.V(2).Info("PCIe switch is unknown", "reason", err)
	}

	numa, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(g.PCIAddress, deviceattribute.ScalarAttribute, sysfs)
	if err != nil {
		logger.V(2).Info("NUMA node is unknown", "reason", err)
	} else if numa.Value.IntValue != nil {
		g.NUMANode = new(int(*numa.Value.IntValue))
	}
	return g
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

// readNVLink reads what the GPU's NVLinks lead to, once: wires stay where they are until somebody
// resets the GPU. What cannot be read now stays unknown until the next discovery: only requests for
// linked GPUs depend on it. So it gets no more time than one call that is not slow, and none while an earlier one is out. It has
// a queue of its own, as links that hang are no reason to do without the GPU. One that hangs altogether is found by any other call.
func (c *Client) readNVLink(ctx context.Context, h *handle, g *gpu.GPU) {
	h.mu.Lock()
	out := h.linksOut
	g.NVLink = h.nvlink
	h.mu.Unlock()
	if g.NVLink != nil || out.IsOut() || !c.features().nvlink || g.MIG != nil && g.MIG.Enabled {
		return
	}
	links := &handle{pci: h.pci, dev: h.dev, queue: queue{c.calls.Of(h.pci, "NVLinks"), c.observe}}
	limited, cancel := context.WithTimeout(ctx, call.SlowAfter)
	defer cancel()
	link, err := optional(c.nvlink(limited, links))
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		_ = errors.As(err, &h.linksOut)
		klog.FromContext(ctx).V(2).Info("What the NVLinks lead to is unknown", "pciAddress", g.PCIAddress, "reason", err)
		return
	}
	g.NVLink, h.nvlink = link, link
}

// nvlink returns nil for a GPU without an active link, or one that is not registered with the fabric
// that it belongs to: what it reaches is not settled yet.
func (c *Client) nvlink(ctx context.Context, h *handle) (*gpu.NVLink, error) {
	// A GPU without NVLink says so at the first link.
	if _, err := linkState(ctx, h, 0); err != nil {
		return nil, err
	}
	if c.features().fabric {
		fabric, err := optional(fabricInfo(ctx, h))
		if err != nil {
			return nil, err
		}
		switch {
		case fabric.State == nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		case fabric.State != nvml.GPU_FABRIC_STATE_COMPLETED || fabric.Status != uint32(nvml.SUCCESS):
			return nil, nil
		case fabric.ClusterUuid != [16]uint8{}:
			return &gpu.NVLink{Clique: fmt.Sprintf("%s.%d", uuidText(fabric.ClusterUuid), fabric.CliqueId)}, nil
		}
	}
	return linkEnds(ctx, h)
}

// linkEnds reads the other ends of all active links.
func linkEnds(ctx context.Context, h *handle) (*gpu.NVLink, error) {
	var gpus, switches []string
	for link := range nvml.NVLINK_MAX_LINKS {
		state, err := linkState(ctx, h, link)
		if errors.Is(err, gpu.ErrInvalid) {
			break // the GPU has fewer
		}
		if state, err = optional(state, err); err != nil {
			return nil, err
		}
		if state != nvml.FEATURE_ENABLED {
			continue
		}
		kind, err := optional(get(ctx, h.queue, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return h.dev.GetNvLinkRemoteDeviceType(link)
		}))
		if err != nil {
			return nil, err
		}
		address, err := linkEnd(ctx, h, link)
		switch {
		case err != nil:
			return nil, err
		case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH && address == "":
			switches = append(switches, gpu.UnknownSwitch)
		case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH:
			switches = append(switches, address)
		case address != "":
			gpus = append(gpus, address)
		}
	}
	if len(gpus)+len(switches) == 0 {
		return nil, nil
	}
	slices.Sort(gpus)
	slices.Sort(switches)
	return &gpu.NVLink{GPUs: slices.Compact(gpus), Switches: slices.Compact(switches)}, nil
}

// linkEnd is the PCI address of what a link leads to, or "".
func linkEnd(ctx context.Context, h *handle, link int) (string, error) {
	info, err := optional(get(ctx, h.queue, "nvmlDeviceGetNvLinkRemotePciInfo_v2", func() (nvml.PciInfo, nvml.Return) {
		return h.dev.GetNvLinkRemotePciInfo(link)
	}))
	if err != nil {
		return "", err
	}
	address, err := pciAddress(cString(info.BusId[:]))
	if err != nil {
		return "", nil //nolint:nilerr // a switch that this machine does not see has no address
	}
	return address, nil
}

func linkState(ctx context.Context, h *handle, link int) (nvml.EnableState, error) {
	return get(ctx, h.queue, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) { return h.dev.GetNvLinkState(link) })
}

// fabricInfo reads the GPU's registration with the NVLink fabric. The second version of the
// structure has all that is needed, and every driver with the function has it.
func fabricInfo(ctx context.Context, h *handle) (nvml.GpuFabricInfo_v2, error) {
	return get(ctx, h.queue, "nvmlDeviceGetGpuFabricInfoV", func() (nvml.GpuFabricInfo_v2, nvml.Return) {
		return h.dev.GetGpuFabricInfoV().V2()
	})
}

func uuidText(id [16]uint8) string {
	text := hex.EncodeToString(id[:])
	return strings.Join([]string{text[:8], text[8:12], text[12:16], text[16:20], text[20:]}, "-")
}
