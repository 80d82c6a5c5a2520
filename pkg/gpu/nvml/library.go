// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// ErrRestartRequired means that this process has loaded the library of another driver
// version than the installed one, and cannot load a second one.
var ErrRestartRequired = errors.New("the process must be restarted to use the installed driver")

// required are the functions that this package calls without looking them up. All of
// them are in R525. The bindings call the versioned names listed here if they exist,
// so checking these names checks what is called.
var required = []string{
	"nvmlSystemGetDriverVersion",
	"nvmlSystemGetCudaDriverVersion_v2",
	"nvmlDeviceGetCount_v2",
	"nvmlDeviceGetHandleByIndex_v2",
	"nvmlDeviceGetHandleByPciBusId_v2",
	"nvmlDeviceGetPciInfo_v3",
	"nvmlDeviceGetUUID",
	"nvmlDeviceGetMinorNumber",
	"nvmlDeviceGetName",
	"nvmlDeviceGetArchitecture",
	"nvmlDeviceGetCudaComputeCapability",
	"nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetVirtualizationMode",
	"nvmlDeviceGetComputeMode",
	"nvmlDeviceSetComputeMode",
	"nvmlDeviceGetMigMode",
	"nvmlDeviceSetMigMode",
	"nvmlDeviceGetGpuInstanceProfileInfo",
	"nvmlDeviceGetGpuInstancePossiblePlacements_v2",
	"nvmlDeviceCreateGpuInstanceWithPlacement",
	"nvmlDeviceGetGpuInstances",
	"nvmlDeviceGetGpuInstanceById",
	"nvmlGpuInstanceGetInfo",
	"nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceGetComputeInstanceProfileInfo",
	"nvmlGpuInstanceCreateComputeInstance",
	"nvmlGpuInstanceGetComputeInstances",
	"nvmlGpuInstanceGetComputeInstanceById",
	"nvmlComputeInstanceGetInfo_v2",
	"nvmlComputeInstanceDestroy",
	"nvmlDeviceGetComputeRunningProcesses_v3",
	"nvmlDeviceGetGraphicsRunningProcesses_v3",
}

// features are functions that a library may lack.
type features struct {
	profileNames   bool // nvmlDeviceGetGpuInstanceProfileInfoV
	addressingMode bool // nvmlDeviceGetAddressingMode
	reservedMemory bool // nvmlDeviceGetMemoryInfo_v2
	mpsProcesses   bool // nvmlDeviceGetMPSComputeRunningProcesses_v3
	utilization    bool // nvmlDeviceGetUtilizationRates
	fabric         bool // nvmlDeviceGetGpuFabricInfoV
	c2c            bool // nvmlDeviceGetC2cModeInfoV
	nvlink         bool // nvmlDeviceGetNvLinkState, and what a link leads to
	// processUtilization is nvmlDeviceGetProcessUtilization, gpm nvmlGpmMetricsGet.
	processUtilization, gpm bool
}

// lookUp returns the optional functions that the library has. It refuses a library
// that lacks a required one, because calling that would end the process.
func lookUp(symbols nvml.ExtendedInterface) (features, error) {
	for _, name := range required {
		if symbols.LookupSymbol(name) != nil {
			return features{}, fmt.Errorf("the driver is too old, it has no %s; R525 or newer is needed: %w",
				name, gpu.ErrNotSupported)
		}
	}
	has := func(name string) bool { return symbols.LookupSymbol(name) == nil }
	return features{
		profileNames:   has("nvmlDeviceGetGpuInstanceProfileInfoV"),
		addressingMode: has("nvmlDeviceGetAddressingMode"),
		reservedMemory: has("nvmlDeviceGetMemoryInfo_v2"),
		mpsProcesses:   has("nvmlDeviceGetMPSComputeRunningProcesses_v3"),
		utilization:    has("nvmlDeviceGetUtilizationRates"),
		fabric:         has("nvmlDeviceGetGpuFabricInfoV"),
		c2c:            has("nvmlDeviceGetC2cModeInfoV"),
		nvlink: has("nvmlDeviceGetNvLinkState") && has("nvmlDeviceGetNvLinkRemoteDeviceType") &&
			has("nvmlDeviceGetNvLinkRemotePciInfo_v2"),

		processUtilization: has("nvmlDeviceGetProcessUtilization"),
		gpm:                has("nvmlGpmMetricsGet") && has("nvmlGpmMigSampleGet") && has("nvmlGpmQueryDeviceSupport"),
	}, nil
}

// bound is the first library that this process loaded. The dynamic linker resolves
// each function of the bindings once, to that library, and never unloads it: a
// library that is loaded from another path later is never called (measured with
// glibc 2.36 and go-nvml 0.13.4). So a driver upgrade needs a new process.
var bound struct {
	sync.Mutex
	path string
}

// checkBound fails if path is the library of another driver version than the bound
// one. Files without a version in their name pass.
func checkBound(path string) error {
	bound.Lock()
	defer bound.Unlock()
	was, is := libraryVersion(bound.path), libraryVersion(path)
	if was == "" || is == "" || was == is {
		return nil
	}
	return fmt.Errorf("the NVML library is %s now, this process has loaded %s: %w", is, was, ErrRestartRequired)
}

func bind(path string) {
	bound.Lock()
	defer bound.Unlock()
	if bound.path == "" {
		bound.path = resolve(path)
	}
}

// libraryVersion returns "580.95.05" for libnvidia-ml.so.580.95.05, following links,
// and "" if the name has no version.
func libraryVersion(path string) string {
	if path == "" {
		return ""
	}
	_, version, _ := strings.Cut(filepath.Base(resolve(path)), ".so.")
	if !strings.Contains(version, ".") {
		return "" // ".so.1" is the name of the interface
	}
	return version
}

func resolve(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target
	}
	return path
}
