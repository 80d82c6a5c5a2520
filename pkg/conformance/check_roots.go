// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// rootChecks are about the device nodes and what containers get of them.
var rootChecks = []Check{
	{
		ID:         "roots.control-nodes",
		Assumption: "the nodes that every CUDA program needs are where the driver looks for device nodes",
		Code:       "pkg/host/devroot.go",
		Run:        checkControlNodes,
	},
	{
		ID:         "roots.gpu-nodes",
		Assumption: "each GPU has a device node there, whose number NVML and /proc agree on",
		Code:       "pkg/host/devices.go",
		Run:        checkGPUNodes,
	},
	{
		ID:         "roots.capabilities",
		Assumption: "the driver publishes numbers for the nodes of MIG capabilities, which need not exist",
		Code:       "pkg/cdi/edit/nodes.go",
		Run:        checkCapabilities,
	},
	{
		ID:         "roots.common-edits",
		Assumption: "NVIDIA's library finds all that a container needs of the driver",
		Code:       "pkg/cdi/common.go",
		Run:        checkCommonEdits,
	},
}

// place is a tree that may have device nodes, as the driver or this process sees it.
type place struct {
	Name, Folder string
	// Number is "195:255"; empty where the tree does not have the node.
	Number string
}

// whereIs says which tree has a node. The first one is that which the driver uses.
func (n *Node) whereIs(ctx context.Context, path string) ([]place, error) {
	return Ask(ctx, n, File, "places of "+path, func(context.Context) ([]place, error) {
		places := []place{
			{Name: "device root", Folder: n.Roots.DevRoot().OnHost},
			{Name: "driver root", Folder: n.Roots.Driver},
			{Name: "host", Folder: hostRoot},
		}
		for i := range places {
			roots := n.Roots
			if i > 0 {
				roots = host.Roots{Dev: places[i].Folder}
			}
			major, minor, err := roots.CharDevice(path)
			switch {
			case err == nil:
				places[i].Number = fmt.Sprintf("%d:%d", major, minor)
			case errors.Is(err, fs.ErrNotExist), errors.Is(err, host.ErrNotCharDevice), i > 0:
			default:
				return nil, err
			}
		}
		return places, nil
	})
}

// nodeFinding says whether the driver finds a node.
func nodeFinding(subject, expected string, places []place) Finding {
	var have []string
	for _, p := range places {
		if p.Number != "" {
			have = append(have, p.Name)
		}
	}
	observed := "nowhere"
	if len(have) > 0 {
		observed = "in " + strings.Join(have, ", ")
	}
	f := Expect(subject, places[0].Number != "", expected, observed)
	if len(have) == 0 {
		return f.Because("nvidia-modprobe makes it on the host, or the driver container below its root")
	}
	return f.Because("the device root is %s: set host.devRoot of the chart to auto, or to where the node is", places[0].Folder)
}

func checkControlNodes(ctx context.Context, n *Node) []Finding {
	const expected = "a character device in the device root"
	var findings []Finding
	for _, path := range host.RequiredNodes() {
		places, err := n.whereIs(ctx, path)
		if err != nil {
			findings = append(findings, Failed(filepath.Base(path), expected, err))
			continue
		}
		findings = append(findings, nodeFinding(filepath.Base(path), expected, places))
	}
	return findings
}

func checkGPUNodes(ctx context.Context, n *Node) []Finding {
	const expected = "a character device in the device root, with the minor number that NVML says"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		places, err := n.whereIs(ctx, fmt.Sprintf("/dev/nvidia%d", g.Minor))
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		minor, err := Ask(ctx, n, File, "minor of GPU "+g.PCIAddress, func(context.Context) (int, error) {
			return n.Roots.GPUMinor(g.PCIAddress)
		})
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		if minor != g.Minor {
			return []Finding{Expect(g.PCIAddress, false, expected, fmt.Sprintf("minor %d in NVML, %d in /proc/driver/nvidia", g.Minor, minor))}
		}
		return []Finding{nodeFinding(g.PCIAddress, expected, places)}
	})
}

func checkCapabilities(ctx context.Context, n *Node) []Finding {
	const expected = "nvidia-caps in /proc/devices, and a minor number for mig/monitor"
	node, err := n.GPUs(ctx)
	if err != nil {
		return nil // driver.nvml says why
	}
	if !hasMIG(node) {
		return nil
	}
	type numbers struct{ Major, Monitor int64 }
	found, err := Ask(ctx, n, File, "numbers of MIG capabilities", func(context.Context) (numbers, error) {
		major, err := n.Roots.CapabilityMajor()
		if err != nil {
			return numbers{}, err
		}
		monitor, err := n.Roots.MonitorCapability()
		return numbers{major, monitor}, err
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	return []Finding{Expect("", true, expected, fmt.Sprintf("%d:%d", found.Major, found.Monitor))}
}

func hasMIG(node *gpu.Node) bool {
	for _, g := range node.GPUs {
		if g.MIG != nil {
			return true
		}
	}
	return false
}

// noClaim is the UID of no claim; specs of claims have those that the API server makes.
const noClaim = "conformance"

func checkCommonEdits(ctx context.Context, n *Node) []Finding {
	const expected = "the libraries and nodes of the driver"
	_, err := Ask(ctx, n, File, "common edits", func(ctx context.Context) (bool, error) {
		specs, err := cdi.New(cdi.Options{Root: n.CDIDir, Roots: n.Roots})
		if err != nil {
			return false, err
		}
		// It renders the spec and compares it with a file; nothing is written.
		return specs.Matches(ctx, noClaim, []cdi.Device{{Name: "none", Edits: cdi.Edits{Nodes: []cdi.Node{{Path: "/dev/null", Major: 1, Minor: 3}}}}})
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	return []Finding{Expect("", true, expected, "found")}
}
