// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
)

// maxConditionMessage is how long a condition's message may be, in bytes. The API allows 32 KiB.
const maxConditionMessage = 1024

// statusOf is what the status of claims says.
func statusOf(states []claimState) []claimstatus.Claim {
	claims := make([]claimstatus.Claim, 0, len(states))
	for _, s := range states {
		one := claimstatus.Claim{Ref: s.claim}
		for i := range s.devices {
			d := &s.devices[i]
			one.Devices = append(one.Devices, claimstatus.Device{
				Pool: d.Pool, Device: d.Device, ShareID: d.ShareID,
				Ready: d.ready(), Reason: d.reason, Message: tenant.Text(d.message, s.claim.Namespace, s.claim.UID, maxConditionMessage), Data: statusData(&d.LiveDevice),
			})
		}
		claims = append(claims, one)
	}
	return claims
}

// statusData is the driver's own part of a device's status.
func statusData(d *claim.LiveDevice) []byte {
	s := &api.DeviceStatus{
		TypeMeta: metav1.TypeMeta{APIVersion: api.StatusVersion, Kind: api.DeviceStatusKind},
		Type:     string(d.Kind), UUID: d.UUID(), ParentUUID: d.GPU, PCIBusID: d.PCIAddress, TimeSlice: string(d.Interval),
	}
	if p := d.Partition; p != nil {
		s.MIG = &api.MIGStatus{Profile: p.Profile, Placement: api.PlacementStatus{Start: p.Placement.Start, Size: p.Placement.Size}}
		if !p.Gone {
			s.MIG.GPUInstanceID, s.MIG.ComputeInstanceID = ptr.To(p.InstanceID), ptr.To(p.ComputeID)
		}
	}
	if l := d.Limits; l != nil {
		s.Limits = &api.LimitsStatus{MemoryBytes: l.MemoryBytes, SMPercent: l.Percent, Multiprocessors: l.Multiprocessors}
		if all := d.Resources.Multiprocessors; all > 0 {
			s.Limits.EffectiveSMPercent = l.Multiprocessors * 100 / all
		}
	}
	if d.Session != nil {
		s.MPS = &api.MPSStatus{Session: d.Session.ID, ServersLost: d.Session.Losses, ClientPriority: api.ClientPriority(d.Session.Priority)}
	}
	data, err := json.Marshal(s)
	if err != nil {
		return []byte("{}") // not with these types
	}
	return data
}
