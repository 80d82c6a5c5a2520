// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"fmt"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/mps"
)

// InUse lists the devices that claims have, by name, whatever becomes of them; also
// those that they had before the machine was started anew, for the kubelet prepares
// them again. With an error there may be more than those.
func (m *Manager) InUse() ([]string, error) {
	boot, err := m.roots.BootID()
	if err != nil {
		return nil, err
	}
	records, unreadable, err := m.journal.list()
	if err != nil {
		return nil, err
	}
	quarantined, err := m.journal.quarantine.files(boot)
	if err != nil {
		return nil, err
	}
	if unreadable = append(unreadable, quarantined...); len(unreadable) > 0 {
		err = fmt.Errorf("which devices the claim of %s has cannot be read", unreadable[0])
	}
	var names []string
	for _, r := range records {
		for i := range r.Devices {
			names = append(names, r.Devices[i].Device)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// surveySessions tells which sessions are not well or may be anybody's, and whether
// there can be any. The journal, if it could be read, is younger than what was seen.
func (m *Manager) surveySessions(inventory *device.Inventory, seen observed, journal *journalView) []device.Condition {
	if silent := m.surveys.silent(seen.err != nil, m.clock()); seen.err != nil {
		if silent < silenceLimit {
			return nil
		}
		return unavailable(inventory, seen.err)
	}
	placements := map[string]*device.PartitionShape{}
	for _, d := range inventory.Devices() {
		placements[base(d)] = d.Partition
	}
	var conditions []device.Condition
	for id, status := range seen.sessions {
		session, known := m.resolve(id, status)
		c, file := device.Condition{}, journal.mayName(id)
		switch {
		case !known:
			continue
		case file != "":
			c.Reason = device.ReleasePending
			c.Message = fmt.Sprintf("MPS on device %s may be that of a claim whose journal file cannot be read (%s). "+
				"Once no pod uses it, remove the file; it ends then", id, file)
		case unwell(status):
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

// mayName is a file that cannot be read, if there is one and no record names the
// session: it ends with the last record that may name it.
func (j *journalView) mayName(session string) string {
	if j == nil || len(j.unreadable) == 0 || slices.ContainsFunc(j.records, func(r *Record) bool { return r.session(session) != nil }) {
		return ""
	}
	return j.unreadable[0]
}

// silenceLimit is for how long the supervisor may not answer before people are told.
// At the start of a node it may begin later than this process.
const silenceLimit = 5 * time.Second

// silent notes whether the supervisor answers, and tells for how long it has not.
func (s *surveys) silent(is bool, now time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !is:
		s.silentSince = nil
		return 0
	case s.silentSince == nil:
		s.silentSince = &now
	}
	return now - *s.silentSince
}

// base is the name of what a device is a share of, or its own.
func base(d device.Device) string {
	if d.Share != nil {
		return d.Share.Base
	}
	return d.Name
}

// unavailable keeps shares from being allocated while nobody can start a session.
func unavailable(inventory *device.Inventory, err error) []device.Condition {
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

// unwell is a session that had clients and cannot have new ones. One that starts
// for the first time has a claim that waits for it.
func unwell(s mps.Status) bool {
	switch s.Phase {
	case mps.Running:
		return false
	case mps.Starting:
		return s.Losses > 0
	}
	return true
}
