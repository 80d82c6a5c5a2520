// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

/*
#include <stdlib.h>
#include "state.h"
*/
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"unsafe"
)

// Held is a call that a fault holds, or one that waits behind it.
type Held struct {
	// Fault is the ID of the fault.
	Fault    int
	Function string
	// GPUs are indexes of those that the call is on.
	GPUs []int
	// PID is the caller's, in its own PID namespace.
	PID int

	entry  C.int
	ticket uint64
}

// Held returns the calls that faults with Hang hold now, of all processes, the oldest first. Calls of processes
// that may not write the state, as in containers, are not among them.
func (f *File) Held() ([]Held, error) {
	var held []Held
	err := f.use(func(h *C.struct_gs_handle) error {
		held = heldCalls(h, false)
		return nil
	})
	return held, err
}

// Behind returns the calls that wait for one that a fault with AllGPUs delays or holds, those that came first first.
func (f *File) Behind() ([]Held, error) {
	var behind []Held
	err := f.use(func(h *C.struct_gs_handle) error {
		behind = heldCalls(h, true)
		return nil
	})
	return behind, err
}

// LetGo lets the n oldest calls go on that a fault holds. Those that come later are held. It is an error if there are
// fewer: a test waits for a call before it lets it go.
func (f *File) LetGo(fault, n int) error {
	return f.use(func(h *C.struct_gs_handle) error {
		held := slices.DeleteFunc(heldCalls(h, false), func(c Held) bool { return c.Fault != fault })
		if len(held) < n {
			return fmt.Errorf("fault %d holds %d calls, not %d", fault, len(held), n)
		}
		for _, c := range held[:n] {
			err := errorOf(C.gs_let_go(h, c.entry, C.uint64_t(c.ticket)))
			if err != nil && !errors.Is(err, syscall.ENOENT) { // its process has died
				return fmt.Errorf("let a call of %s go: %w", c.Function, err)
			}
		}
		return nil
	})
}

func heldCalls(h *C.struct_gs_handle, behind bool) []Held {
	m := new(C.struct_gs_machine)
	C.gs_read(h, m)
	ids := map[C.uint64_t]int{}
	for i := range int(m.fault_count) {
		ids[m.faults[i].serial] = int(m.faults[i].id)
	}
	var held []Held
	for i := range C.int(C.GS_MAX_HELD) {
		var c C.struct_gs_held_call
		if C.gs_held_at(h, i, &c) != 0 || (c.behind != 0) != behind {
			continue
		}
		id, there := ids[c.fault]
		if !there {
			continue // it is about to go on
		}
		call := Held{Fault: id, Function: C.GoString(&c.function[0]), PID: int(c.pid), entry: i, ticket: uint64(c.ticket)}
		for gpu := range int(m.gpu_count) {
			if c.gpus>>gpu&1 != 0 {
				call.GPUs = append(call.GPUs, gpu)
			}
		}
		held = append(held, call)
	}
	slices.SortFunc(held, func(a, b Held) int { return cmp.Compare(a.ticket, b.ticket) })
	return held
}

// endure waits as a call of the library does.
func (f *File) endure(s *Strike) {
	path, function := C.CString(f.path), C.CString(s.function)
	defer C.free(unsafe.Pointer(path))
	defer C.free(unsafe.Pointer(function))
	C.gs_endure(path, &s.fault, function, s.gpus)
}
