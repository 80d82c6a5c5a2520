// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

// #include "files.h"
import "C"

import (
	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// NVIDIA asks for 16384 open files, which are taken to be enough for all contexts that
// a device can have at most.
const (
	enoughFiles = 16384
	perContext  = enoughFiles / 60
)

// hasFiles fails when the server may not open enough files for its contexts on a device.
func (s *Server) hasFiles(m *machine.Machine, device int) error {
	files := uint64(C.inherited_open_files())
	if m.MPS.FewFiles || files >= enoughFiles || uint64(s.contexts(device)*perContext) <= files {
		return nil
	}
	s.log.printf("MPS Server failed to create/open SHM segment.")
	return cuda.OutOfMemory
}
