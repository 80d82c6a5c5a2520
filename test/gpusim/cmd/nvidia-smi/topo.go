// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// pathNames are nvidia-smi's for the ways between two GPUs, from the nearest.
var pathNames = map[nvml.GpuTopologyLevel]string{
	nvml.TOPOLOGY_INTERNAL: "PIX", nvml.TOPOLOGY_SINGLE: "PIX", nvml.TOPOLOGY_MULTIPLE: "PXB",
	nvml.TOPOLOGY_HOSTBRIDGE: "PHB", nvml.TOPOLOGY_NODE: "NODE", nvml.TOPOLOGY_SYSTEM: "SYS",
}

// topology is topo -m: how each GPU reaches each other, without network cards and affinities.
func topology(s *session, gpus []gpu, _ *command, out io.Writer) error {
	links := make([]map[string]int, len(gpus))
	for i, g := range gpus {
		links[i] = g.links()
	}
	for _, g := range gpus {
		fmt.Fprintf(out, "\tGPU%d", g.index)
	}
	fmt.Fprintln(out)
	for i, a := range gpus {
		fmt.Fprintf(out, "GPU%d", a.index)
		for j, b := range gpus {
			path := " X "
			if i != j {
				level, ret := a.GetTopologyCommonAncestor(b.Device)
				if ret != nvml.SUCCESS {
					return fail(code(ret), "Unable to determine the path between GPUs %s and %s: %s", a.busID, b.busID, s.text(ret))
				}
				path = pathNames[level]
				if n := max(links[i][b.busID], min(links[i][aSwitch], links[j][aSwitch])); n > 0 {
					path = fmt.Sprintf("NV%d", n)
				}
			}
			fmt.Fprintf(out, "\t%s", path)
		}
		fmt.Fprintln(out)
	}
	return nil
}

// aSwitch counts links to NVSwitches, of which every GPU reaches every other.
const aSwitch = "NVSwitch"

// links counts the active NVLinks of a GPU by what they lead to: the bus ID of a GPU, or aSwitch.
func (g gpu) links() map[string]int {
	found := map[string]int{}
	for link := range nvml.NVLINK_MAX_LINKS {
		if active, ret := g.GetNvLinkState(link); ret != nvml.SUCCESS || active != nvml.FEATURE_ENABLED {
			continue
		}
		if kind, ret := g.GetNvLinkRemoteDeviceType(link); ret == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
			found[aSwitch]++
		} else if pci, ret := g.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
			found[strings.ToUpper(text(pci.BusId[:]))]++
		}
	}
	return found
}
