// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"syscall"
	"time"
)

// Calls counts, by name, the calls of library functions by all processes since
// the file was made, whatever became of them. Calls of a process that has not
// initialised the library are not counted, nor those of processes that have the
// file read-only, as in containers.
func (f *File) Calls() (map[string]uint64, error) {
	return f.counters(func(bool) bool { return true })
}

// Unmodelled is Calls for the functions that have no model and answered "not
// supported".
func (f *File) Unmodelled() (map[string]uint64, error) {
	return f.counters(func(unmodelled bool) bool { return unmodelled })
}

func (f *File) counters(wanted func(unmodelled bool) bool) (map[string]uint64, error) {
	counts := map[string]uint64{}
	err := f.use(func(h *C.struct_gs_handle) error {
		for i := C.int(0); ; i++ {
			var name *C.char
			var calls C.uint64_t
			var unmodelled C.int
			switch C.gs_counter_at(h, i, &name, &calls, &unmodelled) {
			case 0:
				if wanted(unmodelled != 0) {
					counts[C.GoString(name)] += uint64(calls)
				}
			case C.int(syscall.ENOENT):
				return nil
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return counts, nil
}

// Busy is, for each GPU of the machine, the time that calls of all processes
// have spent inside exclusive latencies, without waiting for each other. A call
// adds its time when it is over.
func (f *File) Busy() ([]time.Duration, error) {
	var busy []time.Duration
	err := f.use(func(h *C.struct_gs_handle) error {
		c := new(C.struct_gs_machine)
		C.gs_read(h, c)
		for gpu := range c.gpu_count {
			busy = append(busy, time.Duration(C.gs_busy(h, gpu)))
		}
		return nil
	})
	return busy, err
}
