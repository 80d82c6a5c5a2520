// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

/*
#include <stdlib.h>
#include "state.h"
*/
import "C"

import (
	"unsafe"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Programs begins the names of functions that are not the library's.
const Programs = C.GS_PROGRAMS

// Strike is a fault that strikes a call.
type Strike struct {
	machine.Fault
	serial C.uint64_t
}

// Strike counts a call of a program's function on the given GPUs, and returns the
// first fault that strikes it, or nil. The library decides about its own calls by
// the same rules.
func (f *File) Strike(function string, gpus ...int) (*Strike, error) {
	name := C.CString(function)
	defer C.free(unsafe.Pointer(name))
	var bits C.uint32_t
	for _, gpu := range gpus {
		bits |= 1 << gpu
	}
	var strike *Strike
	err := f.use(func(h *C.struct_gs_handle) error {
		C.gs_count(h, name)
		c := new(C.struct_gs_machine)
		C.gs_read(h, c)
		if fault := C.gs_strike(h, c, name, bits); fault != nil {
			strike = &Strike{decodeFault(h, fault), fault.serial}
		}
		return nil
	})
	return strike, err
}

// Hangs reports whether calls that the fault struck are to hang still.
func (f *File) Hangs(s *Strike) (bool, error) {
	hangs := false
	err := f.use(func(h *C.struct_gs_handle) error {
		hangs = C.gs_fault_hangs(h, s.serial) != 0
		return nil
	})
	return hangs, err
}
