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

// Functions that are not the library's: MPS begins the names of those of MPS, SMI is a run of nvidia-smi.
const (
	MPS = C.GS_MPS
	SMI = C.GS_SMI
)

// Strike is a fault that strikes a call.
type Strike struct {
	machine.Fault
	function string
	gpus     C.uint32_t
	fault    C.struct_gs_fault
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
			strike = &Strike{decodeFault(h, fault), function, bits, *fault}
		}
		return nil
	})
	return strike, err
}
