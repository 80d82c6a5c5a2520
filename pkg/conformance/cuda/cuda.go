// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cuda calls the few functions of the CUDA driver API that it takes to see
// what a program gets: its devices, a context, memory. It loads libcuda.so.1 when
// told to, so nothing is linked with it.
//
// A context belongs to the thread that made it: callers lock their goroutine to its
// thread for as long as they use a Driver.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// ErrNotFound means that the library cannot be loaded, or lacks a function.
var ErrNotFound = errors.New("no usable libcuda")

// Error is a result of the CUDA driver API (CUresult) that is not success.
type Error struct {
	Call string // "cuInit"
	Code int    // CUresult
	Name string // as the library calls it, "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error returns the call and what it returned.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code) }

// OutOfMemory is CUDA_ERROR_OUT_OF_MEMORY.
const OutOfMemory = 2

// Driver is a loaded libcuda.
type Driver struct{ functions C.struct_driver }

// Load loads the library from a path, or, for a name without a slash, from where the
// dynamic linker finds it. The error wraps ErrNotFound.
func Load(library string) (*Driver, error) {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var d Driver
	if problem := C.driver_load(name, &d.functions); problem != nil {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, C.GoString(problem))
	}
	return &d, nil
}

// result makes an error of what a function returned, unless that is success.
func (d *Driver) result(call string, code C.int) error {
	if code == 0 {
		return nil
	}
	name := "unknown"
	if text := C.driver_error_name(&d.functions, code); text != nil {
		name = C.GoString(text)
	}
	return &Error{Call: call, Code: int(code), Name: name}
}

// Init initialises CUDA. With a control daemon of MPS in reach, this process becomes
// its client.
func (d *Driver) Init() error { return d.result("cuInit", C.driver_init(&d.functions)) }

// Count returns the number of devices that this process sees.
func (d *Driver) Count() (int, error) {
	var count C.int
	err := d.result("cuDeviceGetCount", C.driver_count(&d.functions, &count))
	return int(count), err
}

// Device is what a process can find out about a device without using it.
type Device struct {
	// UUID is without NVML's prefix, since CUDA has none.
	UUID            string
	Multiprocessors int
	TotalBytes      uint64
}

// Device describes a device.
func (d *Driver) Device(ordinal int) (Device, error) {
	var handle, multiprocessors C.int
	var uuid [16]C.uchar
	var total C.size_t
	if err := d.result("cuDeviceGet", C.driver_get(&d.functions, &handle, C.int(ordinal))); err != nil {
		return Device{}, err
	}
	err := errors.Join(
		d.result("cuDeviceGetUuid", C.driver_uuid(&d.functions, &uuid[0], handle)),
		d.result("cuDeviceTotalMem", C.driver_total(&d.functions, &total, handle)),
		d.result("cuDeviceGetAttribute", C.driver_multiprocessors(&d.functions, &multiprocessors, handle)),
	)
	bytes := C.GoBytes(unsafe.Pointer(&uuid[0]), 16)
	return Device{
		Multiprocessors: int(multiprocessors), TotalBytes: uint64(total),
		UUID: fmt.Sprintf("%x-%x-%x-%x-%x", bytes[:4], bytes[4:6], bytes[6:8], bytes[8:10], bytes[10:]),
	}, err
}

// CreateContext makes a context on the device and makes it this thread's.
func (d *Driver) CreateContext(ordinal int) error {
	return d.result("cuCtxCreate", C.driver_context(&d.functions, C.int(ordinal)))
}

// DestroyContext ends the context of CreateContext, and frees its memory.
func (d *Driver) DestroyContext() error {
	return d.result("cuCtxDestroy", C.driver_destroy(&d.functions))
}

// ContextMultiprocessors returns how many multiprocessors this thread's context may
// use, and 0 where the library cannot tell (before CUDA 11.4).
func (d *Driver) ContextMultiprocessors() int {
	var count C.uint
	if C.driver_affinity(&d.functions, &count) != 0 {
		return 0
	}
	return int(count)
}

// Memory returns how much memory is free and how much there is, in bytes, as programs
// are told.
func (d *Driver) Memory() (free, total uint64, err error) {
	var f, t C.size_t
	err = d.result("cuMemGetInfo", C.driver_memory(&d.functions, &f, &t))
	return uint64(f), uint64(t), err
}

// Allocation is a piece of the device's memory.
type Allocation struct {
	address C.ulonglong
	Bytes   uint64
}

// Allocate takes memory of the device.
func (d *Driver) Allocate(bytes uint64) (Allocation, error) {
	a := Allocation{Bytes: bytes}
	err := d.result("cuMemAlloc", C.driver_allocate(&d.functions, &a.address, C.size_t(bytes)))
	return a, err
}

// Fill writes to all of an allocation, which is work for the device.
func (d *Driver) Fill(a Allocation) error {
	return d.result("cuMemsetD8", C.driver_fill(&d.functions, a.address, C.size_t(a.Bytes)))
}

// Synchronize waits until the device has done what this context asked of it.
func (d *Driver) Synchronize() error {
	return d.result("cuCtxSynchronize", C.driver_synchronize(&d.functions))
}
