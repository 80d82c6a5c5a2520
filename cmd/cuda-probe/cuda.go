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
type driver struct {
	functions C.struct_driver
	// say prints an event. Who reads them ends this program when it ends.
	say func(probe.Event)
	// err is the first error. After it nothing is called and said.
	err error
}

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

// must calls a function.
func (d *driver) must(call string, f func() C.int) {
	if d.err != nil {
		return
	}
	if code := f(); code != 0 {
		name := "unknown"
		if text := C.driver_error_name(&d.functions, code); text != nil {
			name = C.GoString(text)
		}
		d.err = &cudaError{call, code, name}
	}
}

// tell says what was found out, unless something has failed.
func (d *driver) tell(e probe.Event) {
	if d.err == nil {
		d.say(e)
	}
}

// load loads the library from a path, or, for a name without a slash, from where the
// dynamic linker finds it, and initialises CUDA. With a control daemon of MPS in reach, this
// process becomes its client.
func (d *driver) load(library string) {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	if problem := C.driver_load(name, &d.functions); problem != nil {
		d.err = fmt.Errorf("no usable libcuda: %s", C.GoString(problem))
	}
	d.must("cuInit", func() C.int { return C.driver_init(&d.functions) })
}

// count returns the number of devices that this process sees.
func (d *driver) count() (count C.int) {
	d.must("cuDeviceGetCount", func() C.int { return C.driver_count(&d.functions, &count) })
	return count
}

// device returns what a process can find out about a device without using it.
func (d *driver) device(ordinal C.int) probe.Event {
	var handle, multiprocessors C.int
	var uuid [16]C.uchar
	var total C.size_t
	d.must("cuDeviceGet", func() C.int { return C.driver_get(&d.functions, &handle, ordinal) })
	d.must("cuDeviceGetUuid", func() C.int { return C.driver_uuid(&d.functions, &uuid[0], handle) })
	d.must("cuDeviceTotalMem", func() C.int { return C.driver_total(&d.functions, &total, handle) })
	d.must("cuDeviceGetAttribute", func() C.int { return C.driver_multiprocessors(&d.functions, &multiprocessors, handle) })
	bytes := C.GoBytes(unsafe.Pointer(&uuid[0]), 16)
	return probe.Event{
		Kind: probe.Device, Multiprocessors: int(multiprocessors), TotalBytes: uint64(total),
		UUID: fmt.Sprintf("%x-%x-%x-%x-%x", bytes[:4], bytes[4:6], bytes[6:8], bytes[8:10], bytes[10:]),
	}
}

// makeContext makes a context on the first device, and says what it is told of it, which a
// percentage of MPS may change only now.
func (d *driver) makeContext() {
	d.must("cuCtxCreate", func() C.int { return C.driver_context(&d.functions, 0) })
	e := probe.Event{Kind: probe.Context, Multiprocessors: d.device(0).Multiprocessors}
	var count C.uint
	if d.err == nil && C.driver_affinity(&d.functions, &count) == 0 { // from CUDA 11.4 on
		e.ContextMultiprocessors = int(count)
	}
	d.tell(e)
}

func (d *driver) destroyContext() {
	d.must("cuCtxDestroy", func() C.int { return C.driver_destroy(&d.functions) })
}

// tellMemory says how much memory is free and how much there is, as programs are told.
func (d *driver) tellMemory() {
	var free, total C.size_t
	d.must("cuMemGetInfo", func() C.int { return C.driver_memory(&d.functions, &free, &total) })
	d.tell(probe.Event{Kind: probe.Memory, FreeBytes: uint64(free), TotalBytes: uint64(total)})
}

// allocation is a piece of the device's memory.
type allocation struct {
	address C.ulonglong
	bytes   uint64
}

// allocate takes memory of the device.
func (d *driver) allocate(bytes uint64) allocation {
	a := allocation{bytes: bytes}
	d.must("cuMemAlloc", func() C.int { return C.driver_allocate(&d.functions, &a.address, C.size_t(bytes)) })
	return a
}

// fill writes to all of an allocation, which is work for the device.
func (d *driver) fill(a allocation) {
	d.must("cuMemsetD8", func() C.int { return C.driver_fill(&d.functions, a.address, C.size_t(a.bytes)) })
}

// synchronize waits until the device has done what this context asked of it.
func (d *driver) synchronize() {
	d.must("cuCtxSynchronize", func() C.int { return C.driver_synchronize(&d.functions) })
}
