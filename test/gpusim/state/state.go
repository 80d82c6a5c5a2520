// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package state reads and changes the shared state file of a simulated GPU
// machine. The file is what the simulated libnvidia-ml.so.1 works on: a change
// made here is seen by every process that uses the library, and the other way
// round.
//
// The C sources in this folder are the only code that knows the file's layout.
// They are compiled into this package and into the library.
package state

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra
#include <stdlib.h>
#include "state.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"syscall"
	"unsafe"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// ErrLayout means that another version of the simulator wrote the state file.
var ErrLayout = errors.New("state has another layout version")

// ErrReadOnly means that the caller may not write the state file.
var ErrReadOnly = errors.New("state is read-only")

// RelativePath is where the state is in a simulated root. A state file at such
// a path has its capability files beside it, in proc/driver/nvidia/capabilities.
const RelativePath = "var/lib/gpusim/state"

// errorOf makes a Go error of a C function's return value.
func errorOf(code C.int) error {
	switch code {
	case 0:
		return nil
	case C.GS_ELAYOUT:
		return fmt.Errorf("%w: %s", ErrLayout, C.GoString(C.gs_strerror(code)))
	case C.GS_EMAGIC:
		return errors.New(C.GoString(C.gs_strerror(code)))
	case C.int(syscall.EROFS):
		return ErrReadOnly
	}
	return syscall.Errno(code)
}

// Create writes m as a new state file and puts it at path in one step, with
// its capability files where the path is one inside a root. Processes that
// have an earlier file open there keep working on that one.
func Create(path string, m *machine.Machine) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("create state: %w", err)
	}
	c := new(C.struct_gs_machine)
	if err := encode(c, m, nil); err != nil {
		return fmt.Errorf("create state %s: %w", path, err)
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if err := errorOf(C.gs_create(name, c)); err != nil {
		return fmt.Errorf("create state %s: %w", path, err)
	}
	f, err := Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.SyncCapabilities()
}

// File is an open state file. Its methods may be called concurrently.
type File struct {
	path string

	mu sync.Mutex // one user of the handle at a time in this process
	h  *C.struct_gs_handle
}

// Open maps a state file, for writing where the caller may write it. The error
// wraps fs.ErrNotExist where there is none, ErrLayout where it is another
// version's.
func Open(path string) (*File, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open state: %w", err)
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	h := (*C.struct_gs_handle)(C.calloc(1, C.sizeof_struct_gs_handle))
	if err := errorOf(C.gs_open(name, h)); err != nil {
		C.free(unsafe.Pointer(h))
		return nil, fmt.Errorf("open state %s: %w", path, err)
	}
	return &File{path: path, h: h}, nil
}

// Close lets go of the file. The File must not be used afterwards, except that
// closing twice is harmless.
func (f *File) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.h == nil {
		return
	}
	C.gs_close(f.h)
	C.free(unsafe.Pointer(f.h))
	f.h = nil
}

// use runs fn with the handle, alone in this process.
func (f *File) use(fn func(h *C.struct_gs_handle) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.h == nil {
		return fmt.Errorf("state %s: %w", f.path, fs.ErrClosed)
	}
	return fn(f.h)
}

// Generation grows with every change by anybody.
func (f *File) Generation() (uint64, error) {
	var generation uint64
	err := f.use(func(h *C.struct_gs_handle) error {
		generation = uint64(C.gs_generation(h))
		return nil
	})
	return generation, err
}

// Snapshot is the machine at one moment, without processes that have died. It
// waits for no writer.
func (f *File) Snapshot() (*machine.Machine, error) {
	var m *machine.Machine
	err := f.use(func(h *C.struct_gs_handle) error {
		c := new(C.struct_gs_machine)
		C.gs_read(h, c)
		C.gs_drop_dead(h, c)
		C.gs_add_holders(h, c)
		m = decode(h, c)
		return nil
	})
	return m, err
}

// Update gives change the present machine under the writer lock, and commits
// what it made of it, with the capability files. If change fails, or the
// machine it leaves does not fit the file, nothing changes. Waits for other
// writers. The error wraps ErrReadOnly where the file may not be written.
func (f *File) Update(change func(*machine.Machine) error) error {
	return f.use(func(h *C.struct_gs_handle) error {
		if err := errorOf(C.gs_begin(h)); err != nil {
			return fmt.Errorf("lock state %s: %w", f.path, err)
		}
		defer C.gs_abort(h) // no effect after a commit
		m := decode(h, h.next)
		if err := change(m); err != nil {
			return err
		}
		next := new(C.struct_gs_machine)
		if err := encode(next, m, h.next); err != nil {
			return fmt.Errorf("update state %s: %w", f.path, err)
		}
		*h.next = *next
		if err := errorOf(C.gs_commit(h)); err != nil {
			return fmt.Errorf("commit state %s: %w", f.path, err)
		}
		return nil
	})
}

// SyncCapabilities rewrites all capability files from the present machine,
// as after something else removed them. It does nothing for a state file that
// is not in a root.
func (f *File) SyncCapabilities() error {
	return f.use(func(h *C.struct_gs_handle) error {
		if err := errorOf(C.gs_sync_capabilities(h)); err != nil {
			return fmt.Errorf("write capability files of state %s: %w", f.path, err)
		}
		return nil
	})
}
