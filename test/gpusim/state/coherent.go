// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"slices"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// coherentModes are the modes in the order of enum gs_coherent_memory.
var coherentModes = [C.GS_COHERENT_MODES]machine.CoherentMemory{
	C.GS_COHERENT_DEFAULT: "", C.GS_COHERENT_NUMA: machine.CoherentNUMA, C.GS_COHERENT_DRIVER: machine.CoherentDriver,
}

func (e *encoder) coherentMemory(c *C.struct_gs_machine, mode machine.CoherentMemory) {
	at := slices.Index(coherentModes[:], mode)
	if at < 0 {
		e.fail("the mode of coherent memory %q is unknown", mode)
		return
	}
	c.coherent_memory = C.int32_t(at) // #nosec G115 -- one of three
}
