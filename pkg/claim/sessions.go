// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// sessionsTime bounds the question which MPS sessions there are. It goes to a
// process on this machine.
const sessionsTime = 2 * time.Second

func (m *Manager) sessions(ctx context.Context) (map[string]mps.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, sessionsTime)
	defer cancel()
	return m.sharing.Sessions(ctx)
}

// servers are the processes that hold a claim's devices on behalf of MPS clients.
// They are no users.
func (m *Manager) servers(ctx context.Context, r *Record) ([]int, error) {
	if len(r.Sessions) == 0 {
		return nil, nil
	}
	sessions, err := m.sessions(ctx)
	if errors.Is(err, sharing.ErrNoSupervisor) {
		// What still holds the device then counts as a user.
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, s := range r.Sessions {
		pids = append(pids, sessions[s.ID].Servers...)
	}
	return pids, nil
}

// tend brings the sessions of a prepared claim to what they have to be, and tells
// people when its processes have lost their server. The caller holds the claim's
// lock.
func (m *Manager) tend(ctx context.Context, r *Record, sessions map[string]mps.Status) error {
	changed := false
	var errs []error
	for i := range r.Sessions {
		s := &r.Sessions[i]
		status, runs := sessions[s.ID]
		if runs && status.Losses <= s.Losses {
			s.Losses = status.Losses
			continue
		}
		why := status.LastLoss
		if !runs {
			why = "the session was gone"
			if err := m.revive(ctx, r, s); err != nil {
				errs = append(errs, err)
				continue
			}
		} else {
			s.Losses = status.Losses
		}
		changed = true
		m.news.tell(ctx, r.Claim, ReasonMPSLost, fmt.Sprintf(
			"The claim %s: device %s: its processes have lost their MPS server (%s). Those that used it have failed; restart them.",
			r.Claim, s.Devices[0].Device, why))
	}
	if changed {
		errs = append(errs, m.journal.save(r))
	}
	return errors.Join(errs...)
}

// revive starts a session that a prepared claim has and that does not exist.
func (m *Manager) revive(ctx context.Context, r *Record, s *SessionRecord) error {
	unlock, err := m.lockFor(ctx, s.pciAddresses(), busyTime)
	if err != nil {
		return err
	}
	defer unlock()
	others, err := m.holders(r)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting an MPS session that a claim has and that is gone", "session", s.ID)
	return m.startSession(ctx, r, s, others, true)
}

// sweepSessions ends the sessions that no record names.
func (m *Manager) sweepSessions(ctx context.Context, boot string, sessions map[string]mps.Status) error {
	var errs []error
	for id, status := range sessions {
		if err := m.sweepSession(ctx, boot, id, status); err != nil {
			errs = append(errs, fmt.Errorf("MPS session %s, which no claim has: %w", id, err))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

func (m *Manager) sweepSession(ctx context.Context, boot, id string, status mps.Status) error {
	if named, err := m.names(boot, id); err != nil || named {
		return err
	}
	session, known := m.resolve(id, status)
	if !known {
		klog.FromContext(ctx).V(4).Info("An MPS session is not of a device of this node, it is left alone", "session", id)
		return nil
	}
	var gpus []string
	for _, d := range session.Devices {
		gpus = append(gpus, d.PCIAddress)
	}
	unlock, err := m.lockFor(ctx, inOrder(gpus), busyTime)
	if err != nil {
		return err
	}
	defer unlock()
	// A claim may have got it meanwhile.
	if named, err := m.names(boot, id); err != nil || named {
		return err
	}
	klog.FromContext(ctx).Info("Ending an MPS session that no claim has", "session", id)
	return m.sharing.Stop(ctx, session)
}

// names tells whether a record of this boot names a session. Of records that
// cannot be read it has to be assumed.
func (m *Manager) names(boot, id string) (bool, error) {
	records, unreadable, err := m.journal.list()
	if err != nil {
		return false, err
	}
	quarantined, err := m.journal.quarantine.files(boot)
	if err != nil || len(unreadable)+len(quarantined) > 0 {
		return true, err
	}
	return slices.ContainsFunc(records, func(r *Record) bool { return r.BootID == boot && r.session(id) != nil }), nil
}

// resolve finds the GPUs of a session that only the supervisor knows.
func (m *Manager) resolve(id string, status mps.Status) (sharing.Session, bool) {
	inventory := m.inventory.Load()
	if inventory == nil {
		return sharing.Session{}, false
	}
	s := sharing.Session{ID: id, MultiUser: status.Spec.MultiUser}
	var first string
	byUUID := map[string]string{}
	for _, d := range inventory.Devices() {
		byUUID[d.GPU.UUID] = d.GPU.PCIAddress
		if d.Name == id || d.Share != nil && d.Share.Base == id {
			first = d.GPU.PCIAddress
		}
	}
	for _, uuid := range status.Spec.Devices {
		address, whole := byUUID[uuid]
		if !whole {
			address = first // a partition of the GPU that the session is named after
		}
		if address == "" {
			return sharing.Session{}, false
		}
		s.Devices = append(s.Devices, sharing.Device{PCIAddress: address, UUID: uuid})
	}
	return s, first != "" && len(s.Devices) > 0
}

// InUse lists the devices that claims have, by name, whatever becomes of them.
func (m *Manager) InUse() ([]string, error) {
	boot, err := m.roots.BootID()
	if err != nil {
		return nil, err
	}
	records, _, err := m.journal.list()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, r := range records {
		if r.BootID != boot {
			continue
		}
		for i := range r.Devices {
			names = append(names, r.Devices[i].Device)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// surveySessions tells which sessions are not well, and whether there can be any.
func (m *Manager) surveySessions(ctx context.Context, inventory *device.Inventory) []device.Condition {
	sessions, err := m.sessions(ctx)
	var conditions []device.Condition
	seen := map[string]bool{}
	for _, d := range inventory.Devices() {
		if err != nil && d.Kind == device.MPS && !seen[d.GPU.PCIAddress] {
			seen[d.GPU.PCIAddress] = true
			conditions = append(conditions, device.Condition{
				PCIAddress: d.GPU.PCIAddress, Kind: device.MPS, Reason: device.MPSUnavailable, Message: err.Error(),
			})
		}
		base := d.Name
		if d.Share != nil {
			base = d.Share.Base
		}
		if status, found := sessions[base]; found && unwell(status) && !seen[base] {
			seen[base] = true
			c := device.Condition{
				PCIAddress: d.GPU.PCIAddress, Reason: device.MPSUnhealthy,
				Message: fmt.Sprintf("MPS on device %s is %s: %s", base, status.Phase, status.Message),
			}
			if d.Partition != nil {
				c.Where = &d.Partition.Placement
			}
			conditions = append(conditions, c)
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

// reconcileSessions looks at the sessions once for all claims.
func (m *Manager) reconcileSessions(ctx context.Context, boot string, uids []types.UID) error {
	sessions, err := m.sessions(ctx)
	if errors.Is(err, sharing.ErrNoSupervisor) && !m.anySession(boot) {
		return nil // and nobody needs one
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, uid := range uids {
		if err := m.tendClaim(ctx, uid, boot, sessions); err != nil {
			errs = append(errs, fmt.Errorf("claim %s: %w", uid, err))
		}
	}
	return errors.Join(append(errs, m.sweepSessions(ctx, boot, sessions))...)
}

func (m *Manager) anySession(boot string) bool {
	records, _, err := m.journal.list()
	return err != nil || slices.ContainsFunc(records, func(r *Record) bool { return r.BootID == boot && len(r.Sessions) > 0 })
}

func (m *Manager) tendClaim(ctx context.Context, uid types.UID, boot string, sessions map[string]mps.Status) error {
	r, err := m.journal.read(uid)
	if err != nil || r == nil || len(r.Sessions) == 0 {
		return nil //nolint:nilerr // reported by those who need it
	}
	release, err := m.locks.tryClaim(uid)
	if err != nil || release == nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	if r, err = m.journal.read(uid); err != nil || r == nil || r.State != Prepared || r.BootID != boot {
		return nil //nolint:nilerr // see above
	}
	return m.tend(ctx, r, sessions)
}
