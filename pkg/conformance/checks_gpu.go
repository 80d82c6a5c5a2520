// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// driverChecks are about NVIDIA's driver: its library, its files and what it says of GPUs.
var driverChecks = []Check{
	{
		ID:         "driver.nvml",
		Assumption: "NVML opens, has the functions that the driver calls, and is of the kernel driver's version",
		Expected:   "R525 or newer, library and kernel driver of one version",
		Code:       "pkg/gpu/nvml/session.go",
		find:       one(checkNVML),
	},
	{
		ID:         "driver.libcuda",
		Assumption: "libcuda is beside NVML, of the same version",
		Expected:   "libcuda.so.1 of the driver's version",
		Code:       "pkg/driver/cdi/common.go",
		find: one(func(q *inquiry) Finding {
			target := cudaLibrary.of(q)
			node, err := gpus.try(q)
			if err != nil {
				return cannot("%s is there, the driver's version is not known", target) // driver.nvml says why
			}
			return expect(strings.HasSuffix(target, ".so."+node.DriverVersion), "%s", target)
		}),
	},
	{
		ID:         "driver.gpus",
		Assumption: "NVML lists all of NVIDIA's GPUs on the PCI bus, and they answer",
		Expected:   "NVML lists it, and it answers",
		Code:       "pkg/gpu/nvml/discover.go",
		find:       checkAllGPUs,
	},
	{
		ID:         "driver.persistence",
		Assumption: "the driver stays initialised, so that the start of an MPS server takes no seconds",
		Expected:   "persistence mode is on",
		So:         "the start of an MPS server may take the time of the driver's initialisation, seconds; run nvidia-persistenced, or nvidia-smi -pm 1",
		Code:       "pkg/mps/supervisor/act.go",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			on := gpuFacts(g).of(q).Persistence
			if on == nil {
				return cannot("the driver does not say")
			}
			return expect(*on, "%s", onOff[*on])
		}),
	},
}

// checkNVML compares the library with the kernel driver by version: after an upgrade without a
// reboot they differ, and NVML fails for everybody.
func checkNVML(q *inquiry) Finding {
	const oldest = 525
	library, node := nvmlLibrary.of(q), gpus.of(q)
	driver, err := version.ParseGeneric(node.DriverVersion)
	if err != nil {
		return cannot("the driver's version is %q", node.DriverVersion)
	}
	return expect(strings.HasSuffix(library, ".so."+node.DriverVersion) && driver.Major() >= oldest, "driver %s, CUDA %d.%d, %s",
		node.DriverVersion, node.CUDAVersion.Major, node.CUDAVersion.Minor, filepath.Base(library))
}

// checkAllGPUs compares NVML with the PCI bus, on which a GPU stays that has fallen off NVML.
func checkAllGPUs(q *inquiry) (findings []Finding) {
	present := busGPUs.of(q)
	if len(present) == 0 {
		return []Finding{cannot("this node has no GPU of NVIDIA's")}
	}
	node, err := gpus.try(q)
	if err != nil {
		return nil // driver.nvml says why
	}
	for _, b := range node.Broken {
		present = slices.DeleteFunc(present, func(address string) bool { return address == b.PCIAddress })
		err := errors.New(b.Reason)
		if strings.Contains(b.Reason, gpu.ErrHung.Error()) || strings.Contains(b.Reason, "has not returned") {
			err = fmt.Errorf("%w: %w", ErrNoAnswer, err)
		}
		findings = append(findings, failed(err).withSubject(b.PCIAddress))
	}
	for _, address := range slices.DeleteFunc(present, node.Has) {
		findings = append(findings, expect(false, "NVML does not list it").withSubject(address))
	}
	if len(findings) == 0 {
		f := expect(true, "%d GPUs", len(node.GPUs))
		f.Expected = "NVML lists all, and they answer"
		findings = []Finding{f}
	}
	return findings
}

// hasMIG reports whether a GPU can be partitioned, and inMIG whether it is in MIG mode.
func hasMIG(g gpu.GPU) bool { return g.MIG != nil }
func inMIG(g *gpu.GPU) bool { return g.MIG != nil && g.MIG.Enabled }

var onOff = map[bool]string{true: "on", false: "off"}

// modeChecks are about the modes of GPUs, which the driver changes as claims need it.
var modeChecks = []Check{
	{
		ID:         "modes.mig",
		Assumption: "the MIG mode is what it was set to: no change waits for a reset",
		Expected:   "no change is pending",
		So:         "the GPU offers what its present mode allows until it is reset",
		Code:       "pkg/gpu/nvml/mig.go",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			if !hasMIG(*g) {
				return Finding{}
			}
			state := migState(g).of(q)
			if state.Pending != state.Enabled {
				return expect(false, "%s, %s after a reset", onOff[state.Enabled], onOff[state.Pending])
			}
			return expect(true, "%s, %d instances", onOff[state.Enabled], len(state.Instances))
		}),
	},
	{
		ID:         "modes.compute",
		Assumption: "nobody else restricts who may use a GPU",
		Expected:   "DEFAULT, or EXCLUSIVE_PROCESS with an MPS session of this driver",
		Code:       "pkg/driver/sharing/effects.go",
		find:       eachGPU(checkComputeMode),
	},
	{
		ID:         "modes.coherent-memory",
		Assumption: "a GPU that is coherent with the CPU has no partitions where the driver manages its memory",
		Expected:   "with CoherentGPUMemoryMode=driver, MIG mode is off",
		So:         "the GPU is published without partitions, since NVIDIA does not support them in this mode: please report that it works",
		Code:       "pkg/device/catalog.go",
		find:       eachGPU(checkCoherentMemory),
	},
	{
		ID:         "modes.fabric",
		Assumption: "undivided GPUs are registered with the NVLink fabric that they belong to",
		Expected:   registered,
		So:         "CUDA programs do not start on it (error 802) until it is: does the fabric manager run, in the driver's version?",
		Code:       "pkg/driver/partition/effects.go",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			if inMIG(g) {
				return Finding{} // the driver does not register it
			}
			pending := fabricPending(g).of(q)
			return expect(pending == "", "%s", cmp.Or(pending, registered))
		}),
	},
}

const registered = "Completed, or no fabric"

// checkComputeMode tells the mode of an MPS session of this driver, which is right, from one that
// somebody has left.
func checkComputeMode(q *inquiry, g *gpu.GPU) Finding {
	if inMIG(g) {
		return Finding{} // each MIG device has a mode of its own, and it has none
	}
	mode := computeMode(g).of(q)
	if mode != gpu.ComputeExclusiveProcess {
		return expect(mode == gpu.ComputeDefault, "%s", mode).
			because("no program can use this GPU until somebody sets the mode to DEFAULT: nvidia-smi -i %s -c DEFAULT", g.UUID)
	}
	sessions, err := mpsSessions.try(q)
	if err != nil {
		return cannot("the mode is %s, and the MPS supervisor does not say whose: %v", mode, err)
	}
	if slices.ContainsFunc(sessions, func(s mps.Status) bool { return slices.Contains(s.Spec.Devices, g.UUID) }) {
		return expect(true, "%s with a session", mode)
	}
	return expect(false, "%s without a session", mode).
		because("shares of this GPU are refused until somebody sets the mode to DEFAULT: nvidia-smi -i %s -c DEFAULT", g.UUID)
}

// checkCoherentMemory looks for a GPU that shows that the driver takes too little to be possible.
func checkCoherentMemory(q *inquiry, g *gpu.GPU) Finding {
	switch g.CoherentMemory {
	case gpu.CoherentDriver:
	case gpu.CoherentUnknown:
		return cannot("/proc/driver/nvidia/params does not say who manages its memory")
	default:
		return Finding{}
	}
	if _, err := migState(g).try(q); errors.Is(err, gpu.ErrNotSupported) {
		return expect(true, "no MIG")
	}
	enabled := migState(g).of(q).Enabled
	return expect(!enabled, "%s", onOff[enabled])
}

// holderChecks are about the processes that use GPUs.
var holderChecks = []Check{
	{
		ID:         "holders.listed",
		Assumption: "NVML lists the processes that use a GPU, with the process IDs that they have here",
		Expected:   "each has a process ID that this pod sees",
		So:         "processes that use the GPU are not recognised, or one has just ended",
		Code:       "pkg/gpu/nvml/usage.go",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			pids := listed(g).of(q)
			found := namesOf(g, pids).of(q)
			if len(found) < len(pids) {
				return expect(false, "NVML lists %v, of which are here: %s", pids, listOf(found))
			}
			return expect(true, "%s", listOf(found))
		}),
	},
	{
		ID:         "holders.others",
		Assumption: "no other process has the GPU open, so that its partitions can be made and can go",
		Expected:   "nobody beside those that NVML lists",
		So:         "while it has the GPU open, it may keep the first partition from being made, and a partition may be in use that no pod has",
		Code:       "pkg/driver/partition",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			open, err := openersOf(g).try(q)
			if err != nil {
				return cannot("%v", err)
			}
			pids, err := listed(g).try(q)
			if err != nil {
				return cannot("open in %s, and NVML does not list processes: %v", listOf(open), err)
			}
			others := slices.DeleteFunc(open, func(p nodeProcess) bool { return slices.Contains(pids, p.PID) || p.Harmless })
			return expect(len(others) == 0, "%s", listOf(others))
		}),
	},
}

func listOf(processes []nodeProcess) string {
	var names []string
	for _, p := range processes {
		names = append(names, fmt.Sprintf("%s (%d)", quote.Name(p.Name), p.PID))
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// hardwareChecks compare GPUs with the simulated ones, on which the driver was tested.
var hardwareChecks = []Check{
	{
		ID:         "hardware.product",
		Assumption: "the GPU is like the simulated one of its model",
		Expected:   "as in the catalogue",
		So:         reportDifferences,
		Code:       "test/gpusim/catalog/boards",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			return compare(q, g, func(is, known *Board) []string { return differing("", is.Product, known.Product, known.Product.Tags) })
		}),
	},
	{
		ID:         "hardware.profiles",
		Assumption: "its partitions are like those of the simulated one",
		Expected:   "as in the catalogue",
		So:         reportDifferences,
		Code:       "test/gpusim/catalog/boards",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			if known := catalogued(g.ProductName); known != nil && known.MIG == nil && g.MIG == nil {
				return Finding{}
			}
			return compare(q, g, differingMIG)
		}),
	},
	{
		ID:         "hardware.latency",
		Assumption: "calls into NVML answer long before they are given up",
		Expected:   "calls that answer",
		So:         "GPUs are taken for hung when their calls take longer than --nvml-call-limit",
		Code:       "pkg/gpu/call/call.go",
		find:       judge(latenciesSoFar, judgeLatencies),
	},
}

const reportDifferences = "the driver reads these values and does not rely on the catalogue, but it was not tested with them: please report them (--catalogue-patch)"

const (
	// slow is the part of the limit of a call above which it is worth reporting.
	slow = 10
	// slowestShown is how many functions the report names.
	slowestShown = 3
)

// judgeLatencies looks at the slowest call, as one is enough to have a GPU taken for hung.
func judgeLatencies(found latencies) Finding {
	if len(found.Functions) == 0 {
		return cannot("NVML was not called")
	}
	var slowest []string
	for _, q := range found.Functions[:min(slowestShown, len(found.Functions))] {
		slowest = append(slowest, fmt.Sprintf("%s %s", q.Function, q.Longest.Round(time.Microsecond)))
	}
	allowed := found.Limit / slow
	f := expect(found.Functions[0].Longest <= allowed, "longest: %s", strings.Join(slowest, ", "))
	f.Expected = fmt.Sprintf("each call of NVML takes %s at most, a part of --nvml-call-limit", allowed)
	return f
}
