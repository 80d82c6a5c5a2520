// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

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

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

// driver is a loaded libcuda with the few functions of the CUDA driver API that it takes to
// see what a program gets. It is loaded when told to, so nothing is linked with it.
type driver struct{ functions C.struct_driver }

// cudaError is a result of the CUDA driver API (CUresult) that is not success.
type cudaError struct {
	call string // "cuInit"
	code C.int
	name string // as the library calls it, "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error returns the call and what it returned.
func (e *cudaError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.call, e.name, e.code) }

// isFull reports whether there was not enough memory (CUDA_ERROR_OUT_OF_MEMORY).
func isFull(err error) bool {
	var result *cudaError
	return errors.As(err, &result) && result.code == 2
}

// load loads the library from a path, or, for a name without a slash, from where the
// dynamic linker finds it, and initialises CUDA. With a control daemon of MPS in reach, this
// process becomes its client.
func (d *driver) load(library string) error {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	if problem := C.driver_load(name, &d.functions); problem != nil {
		return fmt.Errorf("no usable libcuda: %s", C.GoString(problem))
	}
	return d.result("cuInit", C.driver_init(&d.functions))
}

// result makes an error of what a function returned, unless that is success.
func (d *driver) result(call string, code C.int) error {
	if code == 0 {
		return nil
	}
	name := "unknown"
	if text := C.driver_error_name(&d.functions, code); text != nil {
		name = C.GoString(text)
	}
	return &cudaError{call, code, name}
}

// count returns the number of devices that this process sees.
func (d *driver) count() (int, error) {
	var count C.int
	err := d.result("cuDeviceGetCount", C.driver_count(&d.functions, &count))
	return int(count), err
}

// device says what a process can find out about a device without using it.
func (d *driver) device(ordinal int) (probe.Event, error) {
	var handle, multiprocessors C.int
	var uuid [16]C.uchar
	var total C.size_t
	if err := d.result("cuDeviceGet", C.driver_get(&d.functions, &handle, C.int(ordinal))); err != nil {
		return probe.Event{}, err
	}
	err := errors.Join(
		d.result("cuDeviceGetUuid", C.driver_uuid(&d.functions, &uuid[0], handle)),
		d.result("cuDeviceTotalMem", C.driver_total(&d.functions, &total, handle)),
		d.result("cuDeviceGetAttribute", C.driver_multiprocessors(&d.functions, &multiprocessors, handle)),
	)
	bytes := C.GoBytes(unsafe.Pointer(&uuid[0]), 16)
	return probe.Event{
		Kind: probe.Device, Multiprocessors: int(multiprocessors), TotalBytes: uint64(total),
		UUID: fmt.Sprintf("%x-%x-%x-%x-%x", bytes[:4], bytes[4:6], bytes[6:8], bytes[8:10], bytes[10:]),
	}, err
}

// makeContext makes a context on the first device, and says what it is told of it, which a
// percentage of MPS may change only now.
func (d *driver) makeContext() (probe.Event, error) {
	if err := d.result("cuCtxCreate", C.driver_context(&d.functions, 0)); err != nil {
		return probe.Event{}, err
	}
	device, err := d.device(0)
	e := probe.Event{Kind: probe.Context, Multiprocessors: device.Multiprocessors}
	var count C.uint
	if C.driver_affinity(&d.functions, &count) == 0 { // from CUDA 11.4 on
		e.ContextMultiprocessors = int(count)
	}
	return e, err
}

// destroyContext ends the context, and frees its memory.
func (d *driver) destroyContext() error {
	return d.result("cuCtxDestroy", C.driver_destroy(&d.functions))
}

// memory says how much memory is free and how much there is, as programs are told.
func (d *driver) memory() (probe.Event, error) {
	var free, total C.size_t
	err := d.result("cuMemGetInfo", C.driver_memory(&d.functions, &free, &total))
	return probe.Event{Kind: probe.Memory, FreeBytes: uint64(free), TotalBytes: uint64(total)}, err
}

// allocation is a piece of the device's memory.
type allocation struct {
	address C.ulonglong
	bytes   uint64
}

// allocate takes memory of the device.
func (d *driver) allocate(bytes uint64) (allocation, error) {
	a := allocation{bytes: bytes}
	err := d.result("cuMemAlloc", C.driver_allocate(&d.functions, &a.address, C.size_t(bytes)))
	return a, err
}

// fill writes to all of an allocation, which is work for the device.
func (d *driver) fill(a allocation) error {
	return d.result("cuMemsetD8", C.driver_fill(&d.functions, a.address, C.size_t(a.bytes)))
}

// synchronize waits until the device has done what this context asked of it.
func (d *driver) synchronize() error {
	return d.result("cuCtxSynchronize", C.driver_synchronize(&d.functions))
}
