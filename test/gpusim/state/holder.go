// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"fmt"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Holding is something of a GPU that a process holds.
type Holding struct {
	file  *File
	place C.uint64_t
}

// Hold makes this process hold what p says, by GPU, InstanceID and ComputeID, with the
// Kind Compute or Handle, until the File is closed or the process dies. Unlike an entry
// of Own it needs no right to write the state, as in a container, and can be seen from
// other PID namespaces under the PID that the process has there. The process must not
// open and close the state of the same machine in between.
func (f *File) Hold(p machine.Process) (*Holding, error) {
	h := &Holding{file: f}
	if err := h.Change(p); err != nil {
		return nil, err
	}
	return h, nil
}

// Change says how much memory the process has now, and how busy it is. The rest of p must be what it was.
func (h *Holding) Change(p machine.Process) error {
	return h.file.use(func(handle *C.struct_gs_handle) error {
		c := C.struct_gs_process{
			gpu: C.int32_t(p.GPU), instance_id: C.int32_t(p.InstanceID), compute_id: C.int32_t(p.ComputeID),
			kind: C.int32_t(p.Kind), memory_bytes: C.uint64_t(p.MemoryBytes), sm: C.int32_t(p.SM),
		}
		if err := errorOf(C.gs_hold(handle, &c, &h.place)); err != nil {
			return fmt.Errorf("hold GPU %d in state %s: %w", p.GPU, h.file.path, err)
		}
		return nil
	})
}
