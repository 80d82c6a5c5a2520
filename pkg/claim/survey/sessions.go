// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package survey

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// sessionConditions says which sessions are not well or may be anybody's, and whether
// there can be any. The journal, if it could be read, is younger than the sessions.
func (s *Surveyor) sessionConditions(inventory *device.Inventory, sessions map[string]mps.Status, err error, v *view) []device.Condition {
	if silent := s.time(s.silent, "", err != nil); err != nil {
		if silent < silenceLimit {
			return nil
		}
		return mpsUnavailable(inventory, err)
	}
	placements := map[string]*device.PartitionShape{}
	for _, d := range inventory.Devices() {
		placements[base(d)] = d.Partition
	}
	var conditions []device.Condition
	for id, status := range sessions {
		session, known := ResolveSession(inventory, id, status)
		c, file := device.Condition{}, v.unnamedFile(id)
		switch {
		case !known:
			continue
		case file != "":
			c.Reason = device.ReleasePending
			c.Message = fmt.Sprintf("MPS on device %s may be that of a claim whose journal file cannot be read (%s). "+
				"Once no pod uses it, remove the file; it ends then", id, file)
		case unhealthy(status):
			c.Reason = device.MPSUnhealthy
			c.Message = fmt.Sprintf("MPS on device %s is %s: %s", id, status.Phase, status.Message)
		default:
			continue
		}
		if shape := placements[id]; shape != nil {
			c.Where = &shape.Placement
		}
		for _, d := range session.Devices {
			c.PCIAddress = d.PCIAddress
			conditions = append(conditions, c)
		}
	}
	return conditions
}

// unnamedFile is a file that cannot be read and may name the session, if no record does:
// the session ends with the last record that may name it.
func (v *view) unnamedFile(session string) string {
	if v == nil || v.snapshot.NamesSession(session) {
		return ""
	}
	return v.snapshot.MayHoldSession(session)
}

// base is the name of what a device is a share of, or its own.
func base(d device.Device) string {
	if d.Share != nil {
		return d.Share.Base
	}
	return d.Name
}

// mpsUnavailable keeps shares from being allocated while nobody can start a session.
func mpsUnavailable(inventory *device.Inventory, err error) []device.Condition {
	var conditions []device.Condition
	for _, d := range inventory.Devices() {
		same := func(c device.Condition) bool { return c.PCIAddress == d.GPU.PCIAddress }
		if d.Kind == device.MPS && !slices.ContainsFunc(conditions, same) {
			conditions = append(conditions, device.Condition{
				PCIAddress: d.GPU.PCIAddress, Kind: device.MPS, Reason: device.MPSUnavailable, Message: err.Error(),
			})
		}
	}
	return conditions
}

// unhealthy is a session that had clients and cannot have new ones. One that starts
// for the first time has a claim that waits for it.
func unhealthy(s mps.Status) bool {
	switch s.Phase {
	case mps.Running:
		return false
	case mps.Starting:
		return s.Losses > 0
	}
	return true
}

// ResolveSession finds the GPUs of a session that only the supervisor knows. It returns
// false for one that is not of a device of this node.
func ResolveSession(inventory *device.Inventory, id string, status mps.Status) (sharing.Session, bool) {
	if inventory == nil {
		return sharing.Session{}, false
	}
	var first string
	byUUID := map[string]string{}
	for _, d := range inventory.Devices() {
		byUUID[d.GPU.UUID] = d.GPU.PCIAddress
		if name := device.GPUName(d.GPU.PCIAddress); id == name || strings.HasPrefix(id, name+"-") {
			first = d.GPU.PCIAddress
		}
	}
	if first == "" {
		return sharing.Session{}, false
	}
	s := sharing.Session{ID: id, MultiUser: status.Spec.MultiUser}
	for _, uuid := range status.Spec.Devices {
		address, whole := byUUID[uuid]
		if !whole {
			if !strings.HasPrefix(uuid, "MIG-") {
				return sharing.Session{}, false
			}
			address = first // a partition of the GPU that the session is named after
		}
		s.Devices = append(s.Devices, sharing.Device{PCIAddress: address, UUID: uuid})
	}
	return s, len(s.Devices) > 0
}
