// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

// readNVLink reads what the GPU's NVLinks lead to, once: wires stay where they are until somebody
// resets the GPU. What cannot be read now stays unknown until the next discovery: only requests for
// linked GPUs depend on it. So it gets no more time than one call that is not slow, and none while an earlier one is out. It has
// a queue of its own, as links that hang are no reason to do without the GPU. One that hangs altogether is found by any other call.
func (c *Client) readNVLink(ctx context.Context, h *handle, g *gpu.GPU) {
	g.NVLink = lasting(&h.nvlink, func() (links *gpu.NVLink, known bool) {
		if h.linksOut.Load().IsOut() || g.MIG != nil && g.MIG.Enabled {
			return nil, false
		}
		limited, cancel := context.WithTimeout(ctx, call.SlowAfter)
		defer cancel()
		r := &reading{handle: h, ctx: limited, queue: queue{c.calls.Of(h.pci, "NVLinks"), h.lib, c.observe}}
		links = readLinks(r)
		if r.err == nil || errors.Is(r.err, gpu.ErrNotSupported) {
			return links, links != nil
		}
		var out *gpu.PendingError
		if errors.As(r.err, &out) {
			h.linksOut.Store(out)
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
	slices.Sort(links.GPUs)
	slices.Sort(links.Switches)
	return &gpu.NVLink{GPUs: slices.Compact(links.GPUs), Switches: slices.Compact(links.Switches)}
}

func (h *handle) linkState(link int) func() (nvml.EnableState, nvml.Return) {
	return func() (nvml.EnableState, nvml.Return) { return h.dev.GetNvLinkState(link) }
}

// linkEnd adds what an active link leads to.
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
