// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// condition makes a condition of a fault, or returns false if the policy ignores it.
func (f *fault) condition(pciAddress string, h *policy.Health) (device.Condition, bool) {
	c := device.Condition{PCIAddress: pciAddress, Reason: f.Reason, Value: f.Value, Effect: h.EffectOf(string(f.Reason)), Message: f.Detail}
	if f.Reason == device.XID {
		xid := Lookup(f.XID)
		c.Effect = xid.effect(h)
		c.Message += ". " + xid.Advice
	}
	if f.Unplaced && c.Effect == policy.EffectNoExecute {
		// It would evict the pods of others.
		c.Effect = policy.EffectNoSchedule
	}
	if p := f.Partition; p != nil {
		c.Where, c.ProfileID, c.Exact = &p.Placement, &p.ProfileID, true
	}
	return c, c.Effect != policy.EffectIgnore
}
