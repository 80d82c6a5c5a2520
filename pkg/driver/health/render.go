// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

// condition makes a condition of a fault, or returns false if the policy ignores it.
func (f *fault) condition(pciAddress string, h *policy.Health, v verdict) (device.Condition, bool) {
	c := device.Condition{PCIAddress: pciAddress, Reason: f.Reason, Value: f.Value, Effect: h.EffectOf(string(f.Reason)), Message: f.Detail, Over: !f.Gone.IsZero()}
	if f.Reason == device.XID {
		x := xid.Lookup(f.XID)
		c.Effect = v.effect(x, h)
		c.Message += ". " + v.advice(x)
	}
	// Partitions have no part in the fabric.
	c.Undivided = f.Reason == device.FabricUnhealthy
	if f.Unplaced && c.Effect == policy.EffectNoExecute {
		// It would evict the pods of others.
		c.Effect = policy.EffectNoSchedule
	}
	if p := f.Partition; p != nil {
		c.Where, c.ProfileID, c.Exact = &p.Placement, &p.ProfileID, true
	}
	return c, c.Effect != policy.EffectIgnore
}

// effect is that of an XID: the policy's, if it has one, else what follows from the driver's answer, else
// the table's.
func (v verdict) effect(x xid.XID, h *policy.Health) policy.Effect {
	if effect, changed := h.XIDs[x.Number]; changed {
		return effect
	}
	switch {
	case v == verdictHarmless:
		return policy.EffectNone
	case v == verdictDue && x.Effect == policy.EffectNoExecute:
		return policy.EffectNoSchedule
	}
	return x.Effect
}

func (v verdict) advice(x xid.XID) string {
	if v == verdictHarmless {
		return "The NVIDIA driver wants nothing to be done about it"
	}
	return x.Advice
}
