// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// driverChecks are about NVIDIA's driver: its library, its files and what it says of GPUs.
var driverChecks = []Check{
	{
		ID:         "driver.nvml",
		Assumption: "NVML opens, has the functions that the driver calls, and is of the kernel driver's version",
		Code:       "pkg/gpu/nvml/session.go",
		Run:        checkNVML,
	},
	{
		ID:         "driver.libcuda",
		Assumption: "libcuda is beside NVML, of the same version",
		Code:       "pkg/cdi/common.go",
		Run:        checkLibCUDA,
	},
	{
		ID:         "driver.gpus",
		Assumption: "NVML lists all of NVIDIA's GPUs on the PCI bus, and they answer",
		Code:       "pkg/gpu/nvml/discover.go",
		Run:        checkAllGPUs,
	},
	{
		ID:         "driver.persistence",
		Assumption: "the driver stays initialised, so that the start of an MPS server takes no seconds",
		Code:       "pkg/mps/supervisor/act.go",
		Run:        checkPersistence,
	},
}

func checkNVML(ctx context.Context, n *Node) []Finding {
	const expected = "R525 or newer, library and kernel driver of one version"
	library, err := Ask(ctx, n, File, "NVML library", func(context.Context) (string, error) { return n.Roots.LibraryPath() })
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	node, err := n.GPUs(ctx)
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	version, ok := twoNumbers(node.DriverVersion)
	if !ok {
		return []Finding{Cannot("", expected, "the driver's version is %q", node.DriverVersion)}
	}
	const oldest = 525
	same := strings.HasSuffix(library, ".so."+node.DriverVersion)
	return []Finding{Expect("", same && version.major >= oldest, expected,
		fmt.Sprintf("driver %s, CUDA %d.%d, %s", node.DriverVersion, node.CUDAVersion.Major, node.CUDAVersion.Minor, filepath.Base(library)))}
}

func checkLibCUDA(ctx context.Context, n *Node) []Finding {
	const expected = "libcuda.so.1 of the driver's version"
	target, err := Ask(ctx, n, File, "libcuda", func(context.Context) (string, error) {
		library, err := n.Roots.LibraryPath()
		if err != nil {
			return "", err
		}
		target, err := filepath.EvalSymlinks(filepath.Join(filepath.Dir(library), "libcuda.so.1"))
		return filepath.Base(target), err
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	node, err := n.GPUs(ctx)
	if err != nil {
		return []Finding{Cannot("", expected, "%s is there, the driver's version is not known", target)}
	}
	return []Finding{Expect("", strings.HasSuffix(target, ".so."+node.DriverVersion), expected, target)}
}

func checkAllGPUs(ctx context.Context, n *Node) []Finding {
	const expected = "NVML lists it, and it answers"
	present, err := Ask(ctx, n, File, "GPUs on the PCI bus", func(context.Context) ([]string, error) { return n.Roots.NVIDIAGPUs() })
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	if len(present) == 0 {
		return []Finding{Cannot("", expected, "this node has no GPU of NVIDIA's")}
	}
	node, err := n.GPUs(ctx)
	if err != nil {
		return nil // driver.nvml says why
	}
	var findings []Finding
	for _, b := range node.Broken {
		f := Expect(b.PCIAddress, false, expected, b.Reason)
		if strings.Contains(b.Reason, gpu.ErrHung.Error()) || strings.Contains(b.Reason, "has not returned") {
			f = Failed(b.PCIAddress, expected, fmt.Errorf("%w: %s", ErrNoAnswer, b.Reason))
		}
		findings = append(findings, f)
	}
	for _, address := range present {
		broken := slices.ContainsFunc(node.Broken, func(b gpu.Broken) bool { return b.PCIAddress == address })
		if !broken && !node.Has(address) {
			findings = append(findings, Expect(address, false, expected, "NVML does not list it"))
		}
	}
	if len(findings) == 0 {
		findings = []Finding{Expect("", true, "NVML lists all, and they answer", fmt.Sprintf("%d GPUs", len(node.GPUs)))}
	}
	return findings
}

// facts returns what the report says of a GPU, asked once.
func (n *Node) facts(ctx context.Context, g *gpu.GPU) (nvml.Facts, error) {
	if facts, ok := n.known[g.PCIAddress]; ok {
		return facts, nil
	}
	facts, err := Ask(ctx, n, NVML, "facts of GPU "+g.PCIAddress, func(ctx context.Context) (nvml.Facts, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return nvml.Facts{}, err
		}
		return hardware.Facts(ctx, g.PCIAddress)
	})
	if err == nil {
		n.known[g.PCIAddress] = facts
	}
	return facts, err
}

func checkPersistence(ctx context.Context, n *Node) []Finding {
	const expected = "persistence mode is on"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		facts, err := n.facts(ctx, g)
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		if facts.Persistence == nil {
			return []Finding{Cannot(g.PCIAddress, expected, "the driver does not say")}
		}
		observed := map[bool]string{true: "on", false: "off"}[*facts.Persistence]
		return []Finding{Expect(g.PCIAddress, *facts.Persistence, expected, observed).
			Because("each start of an MPS server takes the time of the driver's initialisation, seconds; run nvidia-persistenced, or nvidia-smi -pm 1")}
	})
}
