// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

// prefix is that of the names of all calls into the library.
const prefix = "nvml"

// Call is one call into the library, as Options.Observe gets it.
type Call struct {
	// Function is NVML's: "nvmlDeviceGetUUID".
	Function string
	// PCIAddress is empty for calls that are not about one GPU, or not known to be.
	PCIAddress string
	// Took is how long it took, or was out when nobody waited for it any more.
	Took time.Duration
	// Answer is what the bindings returned, for output; nil where that is nothing but a code.
	Answer any
	// Err is what the caller got.
	Err error
}

// queue is where calls of a library wait for each other, and who observes them, if anybody does.
type queue struct {
	*call.Queue

	lib     *library
	observe func(context.Context, Call)
}

// get makes one call of the library; see call.Do. The name is that of the function, which the library may lack.
// What f works on must stay until it returns, which may be after get: see gpu.PendingError.
func get[T any](ctx context.Context, q queue, name string, f func() (T, nvml.Return)) (T, error) {
	return observed(ctx, q, name, func() (T, error) {
		value, ret := guarded(q.lib, name, f)
		return value, failure(name, q.PCIAddress, ret)
	})
}

// do is get for a call that returns nothing but a code.
func do(ctx context.Context, q queue, name string, f func() nvml.Return) error {
	_, err := get(ctx, q, name, func() (any, nvml.Return) { return nil, f() })
	return err
}

func observed[T any](ctx context.Context, q queue, name string, f func() (T, error)) (T, error) {
	type answer struct {
		value T
		took  time.Duration
	}
	a, err := call.Do(ctx, q.Queue, name, func() (answer, error) {
		began := time.Now()
		value, err := f()
		return answer{value, time.Since(began)}, err
	})
	if q.observe != nil {
		var out *gpu.PendingError
		if errors.As(err, &out) && out.Call == name {
			a.took = time.Since(out.Since)
		}
		q.observe(ctx, Call{Function: name, PCIAddress: q.PCIAddress, Took: a.took, Answer: a.value, Err: err})
	}
	return a.value, err
}

// reading makes calls, mostly about one GPU, one after the other until one of them fails.
type reading struct {
	*handle

	ctx   context.Context
	queue queue
	err   error
}

// must makes a call, unless an earlier one has failed. A call that fails has no value, whatever the bindings return with
// it: of a list they return as many empty elements as it could have had.
func must[T any](r *reading, name string, f func() (T, nvml.Return)) (value T) {
	if r.err != nil {
		return value
	}
	answer, err := get(r.ctx, r.queue, name, f)
	if r.err = err; err == nil {
		value = answer
	}
	return value
}

// ask is must for what this GPU, its driver or the library may not support, which is no failure. It is
// not known then.
func ask[T any](r *reading, name string, f func() (T, nvml.Return)) (value T, known bool) {
	if r.err != nil {
		return value, false
	}
	value = must(r, name, f)
	known = r.err == nil
	if errors.Is(r.err, gpu.ErrNotSupported) {
		r.err = nil
	}
	return value, known
}

// known asks like ask, and returns nil if NVML does not know.
func known[T any](r *reading, name string, f func() (T, nvml.Return)) *T {
	if value, known := ask(r, name, f); known {
		return &value
	}
	return nil
}

// over reports whether nothing more can be asked after an error: a call is out, or there is no more time.
func (r *reading) over() bool { return gpu.IsPending(r.err) || r.ctx.Err() != nil }

// change makes a call that returns nothing but a code, unless an earlier one has failed.
func (r *reading) change(name string, f func() nvml.Return) {
	must(r, name, func() (any, nvml.Return) { return nil, f() })
}

// fail notes an error that is about the GPU, unless there is an earlier one.
func (r *reading) fail(call string, reason error, text string) {
	if r.err == nil {
		r.err = &gpu.Error{Call: call, PCIAddress: r.pci, Err: reason, Text: text}
	}
}

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
	return fmt.Sprintf("%s (NVML code %d)", cmp.Or(codes[ret].text, "code without a name"), int32(ret))
}

// failure returns the error for a code, nil for success. pci may be empty.
func failure(call, pci string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return &gpu.Error{Call: call, PCIAddress: pci, Text: describe(ret), Err: codes[ret].reason}
}
