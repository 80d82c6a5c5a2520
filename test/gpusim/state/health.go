// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import "github.com/partage-dev/partage/test/gpusim/machine"

func (e *encoder) health(c *C.struct_gs_health, h *machine.Health) {
	c.volatile_corrected = C.uint64_t(h.VolatileECC.Corrected)
	c.volatile_uncorrected = C.uint64_t(h.VolatileECC.Uncorrected)
	c.aggregate_corrected = C.uint64_t(h.AggregateECC.Corrected)
	c.aggregate_uncorrected = C.uint64_t(h.AggregateECC.Uncorrected)
	c.clocks_reasons = C.uint64_t(h.ClocksReasons)
	c.remapped_corrected = e.natural("remapped rows", h.RemappedRows.Corrected)
	c.remapped_uncorrected = e.natural("remapped rows", h.RemappedRows.Uncorrected)
	c.remap_pending = flag(h.RemappedRows.Pending)
	c.remap_failed = flag(h.RemappedRows.Failed)
	c.channel_repair = flag(h.ChannelRepair)
	c.tpc_repair = flag(h.TPCRepair)
	c.unrepairable = flag(h.Unrepairable)
	c.retired_pending = flag(h.RetiredPagesPending)
	c.recovery_action = e.natural("recovery action", h.RecoveryAction)
	c.temperature = e.number("temperature", h.Temperature)
	c.fabric_state = e.natural("fabric state", h.Fabric.State)
	c.fabric_status = e.natural("fabric status", h.Fabric.Status)
	c.fabric_mask = C.uint32_t(h.Fabric.Mask)
}

func decodeHealth(c *C.struct_gs_health) machine.Health {
	return machine.Health{
		VolatileECC:  machine.ECCErrors{Corrected: uint64(c.volatile_corrected), Uncorrected: uint64(c.volatile_uncorrected)},
		AggregateECC: machine.ECCErrors{Corrected: uint64(c.aggregate_corrected), Uncorrected: uint64(c.aggregate_uncorrected)},
		RemappedRows: machine.RemappedRows{
			Corrected: int(c.remapped_corrected), Uncorrected: int(c.remapped_uncorrected),
			Pending: c.remap_pending != 0, Failed: c.remap_failed != 0,
		},
		ChannelRepair: c.channel_repair != 0,
		TPCRepair:     c.tpc_repair != 0,
		Unrepairable:  c.unrepairable != 0,

		RetiredPagesPending: c.retired_pending != 0,

		RecoveryAction: int(c.recovery_action),
		ClocksReasons:  uint64(c.clocks_reasons),
		Temperature:    int(c.temperature),
		Fabric:         machine.Fabric{State: int(c.fabric_state), Status: int(c.fabric_status), Mask: uint32(c.fabric_mask)},
	}
}
