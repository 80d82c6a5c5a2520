// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// sweepSessions ends the sessions that no record names, and tightens those with more
// than their claims have: a supervisor may have been away when one was released.
func (m *Manager) sweepSessions(ctx context.Context, boot string, seen observed) error {
	var errs []error
	for id, status := range seen.sessions {
		if err := m.alignSession(ctx, boot, id, status); err != nil {
			errs = append(errs, fmt.Errorf("MPS session %s has other limits than its claims: %w", id, err))
		}
		if err := m.sweepSession(ctx, boot, id, status); err != nil {
			errs = append(errs, fmt.Errorf("MPS session %s, which no claim has: %w", id, err))
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// alignSession gives a session that claims share the limits that they need.
func (m *Manager) alignSession(ctx context.Context, boot, id string, status mps.Status) error {
	want, shared, err := m.wants(boot, id)
	if err != nil || !shared || sameLimits(want, status.Spec) {
		return err
	}
	var gpus []string
	for _, d := range want.Devices {
		gpus = append(gpus, d.PCIAddress)
	}
	unlock, err := m.lockSoon(ctx, inOrder(gpus))
	if err != nil {
		return err
	}
	defer unlock()
	// Claims may have come and gone meanwhile, and have seen to it.
	want, shared, err = m.wants(boot, id)
	if err == nil && shared {
		_, err = m.sharing.Start(ctx, want, true)
	}
	return err
}

// wants is a session as its claims need it, if they are all prepared: others are
// about to bring it to what it has to be.
func (m *Manager) wants(boot, id string) (want sharing.Session, shared bool, err error) {
	all, err := m.neighbours(&Record{BootID: boot})
	if err != nil {
		return want, false, err
	}
	holders := all.holders()
	var own *SessionRecord
	for _, r := range holders {
		if s := r.session(id); s != nil && s.Shared {
			if r.State != Prepared || !s.live() {
				return want, false, nil
			}
			own = s
		}
	}
	if own == nil || len(all.unclear) > 0 {
		return want, false, nil
	}
	return own.wanted(holders), true, nil
}

func sameLimits(want sharing.Session, is mps.Spec) bool {
	return want.Limits.ThreadPercentage == is.ThreadPercentage && maps.Equal(want.Limits.MemoryBytes, is.Memory)
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
	unlock, err := m.lockSoon(ctx, inOrder(gpus))
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
	all, err := m.neighbours(&Record{BootID: boot})
	if err != nil {
		return false, err
	}
	return len(all.unclear) > 0 || slices.ContainsFunc(all.records, func(r *Record) bool { return r.session(id) != nil }), nil
}

// resolve finds the GPUs of a session that only the supervisor knows.
func (m *Manager) resolve(id string, status mps.Status) (sharing.Session, bool) {
	inventory := m.inventory.Load()
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
