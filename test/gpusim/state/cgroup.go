// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

// MemoryLeft is how much more of a GPU's memory the driver's limit of its cgroup leaves a process: more than any GPU has where
// there is none. It takes no lock: of two processes of a cgroup that ask at the same time, both may get the rest.
func (f *File) MemoryLeft(gpu, pid int) (left uint64, err error) {
	err = f.use(func(h *C.struct_gs_handle) error {
		c := new(C.struct_gs_machine)
		C.gs_read(h, c)
		C.gs_drop_dead(h, c)
		C.gs_add_holders(h, c)
		left = uint64(C.gs_memory_left(c, C.int(gpu), C.int(pid)))
		return nil
	})
	return left, err
}
