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
	"os"
	"path/filepath"
	"unsafe"
)

// Location is where a process finds the simulated machine.
type Location struct {
	// State is the path of the state file.
	State string
	// Root is the folder whose dev says what the process sees, "/" in a
	// container.
	Root string
}

// Find looks for the state file on behalf of the running executable, in the
// order in which the library does: the environment's GPUSIM_STATE, then
// var/lib/gpusim/state in the root that holds the executable's usr/bin, then
// the link that lies among the libraries of that root (so it is in a
// container). The error wraps fs.ErrNotExist if there is none.
func Find() (Location, error) {
	self, err := os.Executable()
	if err != nil {
		return Location{}, fmt.Errorf("find state: %w", err)
	}
	return FindFor(self)
}

// FindFor is Find for the executable or library at path self.
func FindFor(self string) (Location, error) {
	self, err := filepath.EvalSymlinks(self)
	if err != nil {
		return Location{}, fmt.Errorf("find state: %w", err)
	}
	name := C.CString(self)
	defer C.free(unsafe.Pointer(name))
	paths := (*C.struct_gs_paths)(C.calloc(1, C.sizeof_struct_gs_paths))
	defer C.free(unsafe.Pointer(paths))
	if err := errorOf(C.gs_find(name, paths)); err != nil {
		return Location{}, fmt.Errorf("find state of the simulated machine for %s: %w", self, err)
	}
	l := Location{State: C.GoString(&paths.state[0]), Root: C.GoString(&paths.root[0])}
	if l.Root == "" {
		l.Root = "/"
	}
	return l, nil
}

// IsCharDevice reports whether path is a character device, by the same test that
// the library uses for what a process can see.
func IsCharDevice(path string) bool {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	return C.gs_is_char_device(name) != 0
}
