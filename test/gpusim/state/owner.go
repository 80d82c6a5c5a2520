// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

/*
#include <stdlib.h>
#include "state.h"
*/
import "C"

import (
	"fmt"
	"time"
	"unsafe"
)

// Own gives this open file an owner, for processes in the machine: their entries
// are there until the File is closed or this process dies, however it does. The
// error wraps ErrReadOnly where the file may not be written.
func (f *File) Own() (uint64, error) {
	var owner uint64
	err := f.use(func(h *C.struct_gs_handle) error {
		if h.owner == 0 {
			if err := errorOf(C.gs_own(h)); err != nil {
				return fmt.Errorf("own processes in state %s: %w", f.path, err)
			}
		}
		owner = uint64(h.owner)
		return nil
	})
	return owner, err
}

// WantedFaults returns the GPUs on which the owner's MPS server is to
// have a fault (machine.Process.Fault).
func (f *File) WantedFaults(owner uint64) ([]int, error) {
	var gpus []int
	err := f.use(func(h *C.struct_gs_handle) error {
		bits := uint32(C.gs_wanted_faults(h, C.uint64_t(owner)))
		for gpu := range C.GS_MAX_GPUS {
			if bits>>gpu&1 != 0 {
				gpus = append(gpus, gpu)
			}
		}
		return nil
	})
	return gpus, err
}

// OpenDriver has the driver open until the File is closed. Where nobody else has, and a
// GPU is not in persistence mode, it takes as long as the machine's latency DriverOpen
// says.
func (f *File) OpenDriver() error {
	var duration time.Duration
	err := f.use(func(h *C.struct_gs_handle) error {
		duration = time.Duration(C.gs_open_driver(h))
		return nil
	})
	time.Sleep(duration)
	return err
}

// DriverOpen is the name of the latency of the driver's initialisation.
const DriverOpen = C.GS_DRIVER_OPEN

// BootID is that of the machine.
func (f *File) BootID() (string, error) {
	var id string
	err := f.use(func(h *C.struct_gs_handle) error {
		var c [C.GS_NAME]C.char
		C.gs_boot_id(h, &c[0])
		id = C.GoString(&c[0])
		return nil
	})
	return id, err
}

// InPlace reports whether the file is still the one at its path. It is not after
// the machine was made again or removed.
func (f *File) InPlace() (bool, error) {
	name := C.CString(f.path)
	defer C.free(unsafe.Pointer(name))
	in := false
	err := f.use(func(h *C.struct_gs_handle) error {
		in = C.gs_in_place(h, name) != 0
		return nil
	})
	return in, err
}
