// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"errors"
	"fmt"
)

// Reasons for which the hardware refuses. They are compared with errors.Is;
// anything not listed is an opaque error.
var (
	// ErrDriverNotLoaded: the NVML library cannot be loaded, or it can and the
	// kernel driver behind it is absent.
	ErrDriverNotLoaded = errors.New("NVIDIA driver is not loaded")
	// ErrNotFound: no such GPU or instance.
	ErrNotFound = errors.New("not found")
	// ErrNotSupported: this GPU or driver cannot do it.
	ErrNotSupported = errors.New("not supported")
	// ErrInUse: a process, or an instance inside, still holds it.
	ErrInUse = errors.New("in use")
	// ErrNoRoom: the placement or an engine is taken.
	ErrNoRoom = errors.New("insufficient resources")
	// ErrNoPermission: the caller may not change the GPU.
	ErrNoPermission = errors.New("no permission")
	// ErrLost: the GPU has fallen off the bus.
	ErrLost = errors.New("GPU is lost")
	// ErrResetRequired: the GPU does nothing until it is reset.
	ErrResetRequired = errors.New("GPU requires a reset")
	// ErrInvalid: the library does not know an argument: a profile, a placement
	// or a handle from before a reset.
	ErrInvalid = errors.New("invalid argument")
	// ErrTimeout: the driver gave up waiting; a retry may succeed.
	ErrTimeout = errors.New("timed out")
)

// Error is a failed hardware call. It names the call and the device, so that
// what reaches a pod's event says which GPU and what was attempted.
type Error struct {
	// Call is the library function, "nvmlDeviceCreateGpuInstanceWithPlacement".
	Call string
	// PCIAddress is empty for calls that concern no single GPU.
	PCIAddress string
	// Text is the library's own description of the code.
	Text string
	// Err is one of the reasons above, or nil.
	Err error
}

func (e *Error) Error() string {
	on := ""
	if e.PCIAddress != "" {
		on = " on GPU " + e.PCIAddress
	}
	return fmt.Sprintf("%s%s: %s", e.Call, on, e.Text)
}

func (e *Error) Unwrap() error { return e.Err }
