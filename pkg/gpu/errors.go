// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Reasons for which a hardware call fails, for errors.Is. An error may have none of
// them.
var (
	// ErrDriverNotLoaded: the NVML library or the kernel driver behind it is absent.
	ErrDriverNotLoaded = errors.New("NVIDIA driver is not loaded")
	// ErrNotFound: no such GPU or instance.
	ErrNotFound = errors.New("not found")
	// ErrNotSupported: this GPU or driver does not support it.
	ErrNotSupported = errors.New("not supported")
	// ErrInUse: a process, or an instance inside, still uses it.
	ErrInUse = errors.New("in use")
	// ErrNoRoom: the placement or an engine is taken.
	ErrNoRoom = errors.New("insufficient resources")
	// ErrNoPermission: the caller may not change the GPU.
	ErrNoPermission = errors.New("no permission")
	// ErrLost: the GPU has fallen off the bus.
	ErrLost = errors.New("GPU is lost")
	// ErrResetRequired: the GPU does nothing until it is reset.
	ErrResetRequired = errors.New("GPU requires a reset")
	// ErrInvalid: the library does not accept an argument, such as a profile, a
	// placement, or a handle from before a reset.
	ErrInvalid = errors.New("invalid argument")
	// ErrTimeout: the driver gave up waiting; a retry may succeed.
	ErrTimeout = errors.New("timed out")
	// ErrUnknown: the driver failed without a reason; a retry may succeed.
	ErrUnknown = errors.New("unknown driver error")
	// ErrVersionMismatch: the library and the kernel driver are of different
	// versions, as in the middle of an upgrade.
	ErrVersionMismatch = errors.New("library and kernel driver differ in version")
	// ErrFabricPending: the GPU is not registered with the NVLink fabric yet. CUDA programs do not
	// start until it is.
	ErrFabricPending = errors.New("not registered with the NVLink fabric yet")
	// ErrHung: a call has not returned for long. It may still take effect; see PendingError.
	ErrHung = errors.New("does not answer")
	// ErrSlow: a call takes longer than calls do, or waits behind one on another GPU that does not
	// return. It may still take effect; see PendingError.
	ErrSlow = errors.New("is slow")
)

// Transient reports whether the same call may succeed a little later by itself.
func Transient(err error) bool {
	return errors.Is(err, ErrTimeout) || errors.Is(err, ErrUnknown) || errors.Is(err, ErrInUse) || errors.Is(err, ErrFabricPending)
}

// Error is a failed hardware call. It names the call and the GPU, so that a pod's
// event does too.
type Error struct {
	// Call is the library function, "nvmlDeviceCreateGpuInstanceWithPlacement".
	Call string
	// PCIAddress is empty for calls that are not about one GPU.
	PCIAddress string
	// Text is the library's own description of the code.
	Text string
	// Err is one of the reasons above, or nil.
	Err error
}

func (e *Error) Error() string { return onGPU(e.Call, e.PCIAddress) + ": " + e.Text }

// onGPU names a call and its GPU, if there is one.
func onGPU(call, pciAddress string) string {
	if pciAddress == "" {
		return call
	}
	return call + " on GPU " + pciAddress
}

func (e *Error) Unwrap() error { return e.Err }

// PendingError is a call that has not returned although its caller waits no longer, or one that
// was not attempted because of an earlier one on the same GPU.
//
// The call cannot be cancelled and may take effect at any time until Done is closed.
// The GPU must stay locked until then.
type PendingError struct {
	// Call and PCIAddress are those of the call that does not return.
	Call, PCIAddress string
	// Since is when it was made.
	Since time.Time
	// Done is closed when it has returned.
	Done <-chan struct{}
	// Behind is an older call on another GPU, or on none, that may keep this one from returning.
	Behind *PendingError
	// Err wraps ErrHung or ErrSlow, or neither if the call has been out for a moment only, and the error
	// of the caller's context if that is why it waits no longer. Nil stands for ErrHung.
	Err error
}

func (e *PendingError) Error() string {
	text := fmt.Sprintf("%s has not returned since %s", onGPU(e.Call, e.PCIAddress), e.Since.Format(time.TimeOnly))
	if e.Behind != nil {
		text += fmt.Sprintf(", behind %s, out since %s", onGPU(e.Behind.Call, e.Behind.PCIAddress), e.Behind.Since.Format(time.TimeOnly))
	}
	if e.Err != nil && e.Err != ErrHung { //nolint:errorlint // what is wrapped with it is said
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *PendingError) Unwrap() error { return cmp.Or(e.Err, ErrHung) }

// IsPending reports whether an error is that of a call that has not returned.
func IsPending(err error) bool {
	var pending *PendingError
	return errors.As(err, &pending)
}
