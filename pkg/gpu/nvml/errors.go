// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// code describes one of NVML's return codes.
type code struct {
	text   string
	reason error // nil if no caller acts on it
}

// codes has the texts of nvmlErrorString. That function is not called, because loading
// a library replaces it while other goroutines may be calling it. A code that is not
// listed has no reason.
var codes = map[nvml.Return]code{
	nvml.SUCCESS:                         {"Success", nil},
	nvml.ERROR_UNINITIALIZED:             {"Uninitialized", gpu.ErrDriverNotLoaded},
	nvml.ERROR_INVALID_ARGUMENT:          {"Invalid Argument", gpu.ErrInvalid},
	nvml.ERROR_NOT_SUPPORTED:             {"Not Supported", gpu.ErrNotSupported},
	nvml.ERROR_NO_PERMISSION:             {"Insufficient Permissions", gpu.ErrNoPermission},
	nvml.ERROR_NOT_FOUND:                 {"Not Found", gpu.ErrNotFound},
	nvml.ERROR_INSUFFICIENT_SIZE:         {"Insufficient Size", nil},
	nvml.ERROR_INSUFFICIENT_POWER:        {"Insufficient External Power", nil},
	nvml.ERROR_DRIVER_NOT_LOADED:         {"Driver Not Loaded", gpu.ErrDriverNotLoaded},
	nvml.ERROR_TIMEOUT:                   {"Timeout", gpu.ErrTimeout},
	nvml.ERROR_IRQ_ISSUE:                 {"Interrupt Request Issue", nil},
	nvml.ERROR_LIBRARY_NOT_FOUND:         {"NVML Shared Library Not Found", gpu.ErrDriverNotLoaded},
	nvml.ERROR_FUNCTION_NOT_FOUND:        {"Function Not Found", gpu.ErrNotSupported},
	nvml.ERROR_CORRUPTED_INFOROM:         {"Corrupted infoROM", nil},
	nvml.ERROR_GPU_IS_LOST:               {"GPU is lost", gpu.ErrLost},
	nvml.ERROR_RESET_REQUIRED:            {"GPU requires reset", gpu.ErrResetRequired},
	nvml.ERROR_OPERATING_SYSTEM:          {"GPU access blocked by the operating system", gpu.ErrNoPermission}, // a cgroup
	nvml.ERROR_LIB_RM_VERSION_MISMATCH:   {"Driver/library version mismatch", gpu.ErrVersionMismatch},
	nvml.ERROR_IN_USE:                    {"In use by another client", gpu.ErrInUse},
	nvml.ERROR_MEMORY:                    {"Insufficient Memory", nil},
	nvml.ERROR_NO_DATA:                   {"No data", nil},
	nvml.ERROR_INSUFFICIENT_RESOURCES:    {"Insufficient Resources", gpu.ErrNoRoom},
	nvml.ERROR_ARGUMENT_VERSION_MISMATCH: {"Argument version mismatch", gpu.ErrNotSupported},
	nvml.ERROR_DEPRECATED:                {"Deprecated", gpu.ErrNotSupported},
	nvml.ERROR_NOT_READY:                 {"Not ready", nil},
	nvml.ERROR_GPU_NOT_FOUND:             {"GPU not found", gpu.ErrNotFound},
	nvml.ERROR_INVALID_STATE:             {"Invalid state", nil},
	nvml.ERROR_UNKNOWN:                   {"Unknown Error", gpu.ErrUnknown},
}

func describe(ret nvml.Return) string {
	text := codes[ret].text
	if text == "" {
		text = "code without a name"
	}
	return fmt.Sprintf("%s (NVML code %d)", text, int32(ret))
}

// failure returns the error for a code, nil for success. pci may be empty.
func failure(call, pci string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return &gpu.Error{Call: call, PCIAddress: pci, Text: describe(ret), Err: codes[ret].reason}
}
