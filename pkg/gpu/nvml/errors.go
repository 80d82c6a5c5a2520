// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// reasons translate NVML's codes. A code that is not listed stays opaque.
var reasons = map[nvml.Return]error{
	nvml.ERROR_UNINITIALIZED:             gpu.ErrDriverNotLoaded,
	nvml.ERROR_DRIVER_NOT_LOADED:         gpu.ErrDriverNotLoaded,
	nvml.ERROR_LIBRARY_NOT_FOUND:         gpu.ErrDriverNotLoaded,
	nvml.ERROR_INVALID_ARGUMENT:          gpu.ErrInvalid,
	nvml.ERROR_NOT_SUPPORTED:             gpu.ErrNotSupported,
	nvml.ERROR_FUNCTION_NOT_FOUND:        gpu.ErrNotSupported,
	nvml.ERROR_ARGUMENT_VERSION_MISMATCH: gpu.ErrNotSupported,
	nvml.ERROR_NO_PERMISSION:             gpu.ErrNoPermission,
	nvml.ERROR_OPERATING_SYSTEM:          gpu.ErrNoPermission, // a cgroup blocks the device
	nvml.ERROR_NOT_FOUND:                 gpu.ErrNotFound,
	nvml.ERROR_GPU_NOT_FOUND:             gpu.ErrNotFound,
	nvml.ERROR_TIMEOUT:                   gpu.ErrTimeout,
	nvml.ERROR_GPU_IS_LOST:               gpu.ErrLost,
	nvml.ERROR_RESET_REQUIRED:            gpu.ErrResetRequired,
	nvml.ERROR_IN_USE:                    gpu.ErrInUse,
	nvml.ERROR_INSUFFICIENT_RESOURCES:    gpu.ErrNoRoom,
}

// failure turns a code into an error, nil for success. pci may be empty.
func failure(call, pci string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return &gpu.Error{
		Call:       call,
		PCIAddress: pci,
		Text:       fmt.Sprintf("%s (NVML code %d)", ret.Error(), int32(ret)),
		Err:        reasons[ret],
	}
}

// do calls NVML unless ctx is done.
func do(ctx context.Context, call, pci string, f func() nvml.Return) error {
	if err := ctx.Err(); err != nil {
		return &gpu.Error{Call: call, PCIAddress: pci, Text: "not attempted: " + err.Error(), Err: err}
	}
	return failure(call, pci, f())
}

// get is do for a call that returns a value.
func get[T any](ctx context.Context, call, pci string, f func() (T, nvml.Return)) (T, error) {
	var value T
	err := do(ctx, call, pci, func() (ret nvml.Return) {
		value, ret = f()
		return ret
	})
	return value, err
}

// optional turns "not supported" into the zero value.
func optional[T any](value T, err error) (T, error) {
	if errors.Is(err, gpu.ErrNotSupported) {
		var zero T
		return zero, nil
	}
	return value, err
}

// explainInit adds what a user can do about the failures of nvmlInit that need
// more than waiting.
func explainInit(err error) error {
	var failed *gpu.Error
	if errors.As(err, &failed) && failed.Err == nil {
		return fmt.Errorf("%w; if the driver was upgraded, the kernel module and the library may differ: "+
			"reload the module and restart this process", err)
	}
	return err
}
