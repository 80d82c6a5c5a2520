// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

const (
	// roomTime bounds the wait for a place that another claim has. The kubelet
	// gives a call 45 seconds.
	roomTime = 15 * time.Second
	// recordPoll is how often the record of the other claim is looked at, which
	// another process may change.
	recordPoll = 200 * time.Millisecond
)

// OverlapError says that a device of a claim uses a part of a GPU that another
// claim holds. The scheduler does not allocate so; this is the last line of
// defence when it is mistaken, or when a pod was deleted by force.
type OverlapError struct {
	Device string
	Other  Ref
	// OtherDevice and OtherState are what the other claim has.
	OtherDevice string
	OtherState  State
	// Shares is how many shares the device has, if too many claims want one: the
	// other claim is one of them. Otherwise 0.
	Shares int
}

func (e *OverlapError) Error() string {
	if e.Shares > 0 {
		return fmt.Sprintf("device %s has %d shares and all are taken, one of them by claim %s", e.Device, e.Shares, e.Other)
	}
	return fmt.Sprintf("device %s overlaps with %s, which is %s for claim %s", e.Device, e.OtherDevice, e.OtherState, e.Other)
}

// abandoned tells whether no pod can run on what the other claim has: it is being
// released, or it is what a killed process or a failed undoing left.
func (e *OverlapError) abandoned() bool { return e.OtherState != Prepared }

// checkOverlap compares a record with those of all other claims. The caller
// holds the locks of all its GPUs, so that no other can begin there.
func (n *neighbours) checkOverlap(want *Record) error {
	for _, other := range n.records {
		if err := want.checkOverlap(other); err != nil {
			return err
		}
	}
	return nil
}

// checkRoom counts the shares that claims have of the devices of a plan. One that the
// policy does not offer any more keeps those that it had, whatever their number, and a
// claim gets again what it had.
func (n *neighbours) checkRoom(plan *Plan, r *Record) error {
	if plan.again {
		return nil
	}
	taken := map[string]int{}
	holders := n.holders()
	for i, step := range plan.Steps {
		if step.Device.Share == nil || step.Admin || step.withdrawn {
			continue
		}
		d := &r.Devices[i]
		others := d.sharers(holders)
		taken[d.Device]++
		if len(others) > 0 && len(others)+taken[d.Device] > step.Device.Share.Clients {
			other := others[max(0, slices.IndexFunc(others, func(o owned) bool { return o.record.State != Prepared }))]
			return &OverlapError{
				Device: d.Device, Other: other.record.Claim, OtherDevice: other.Device, OtherState: other.record.State,
				Shares: step.Device.Share.Clients,
			}
		}
	}
	return nil
}

func (r *Record) checkOverlap(other *Record) error {
	for i := range r.Devices {
		for j := range other.Devices {
			if r.Devices[i].overlaps(&other.Devices[j]) {
				return &OverlapError{
					Device: r.Devices[i].Device, Other: other.Claim,
					OtherDevice: other.Devices[j].Device, OtherState: other.State,
				}
			}
		}
	}
	return nil
}

// await waits until the claim that is in the way has changed: after a pod was
// deleted by force, its devices are allocated again before they are released. An
// abandoned claim is released here. The caller holds its own claim's lock and no
// GPU's.
func (m *Manager) await(ctx context.Context, overlap *OverlapError, boot string) error {
	if overlap.abandoned() {
		return m.clear(ctx, overlap, boot)
	}
	for {
		changed := m.journal.changed.wait()
		if !m.holds(overlap) {
			return nil
		}
		timer := time.NewTimer(recordPoll)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w, and was not released in time", overlap)
		}
		timer.Stop()
		if overlap.Shares > 0 {
			return nil // any other claim may have given a share back
		}
	}
}

// holds tells whether the other claim still is in the way.
func (m *Manager) holds(overlap *OverlapError) bool {
	r, err := m.journal.read(overlap.Other.UID)
	return err == nil && r != nil && r.State == overlap.OtherState && r.has(overlap.OtherDevice)
}

func (r *Record) has(name string) bool {
	return slices.ContainsFunc(r.Devices, func(d DeviceRecord) bool { return d.Device == name })
}

// clear finishes what an abandoned claim left, or waits until the call that is
// just releasing it has done so. Two claims that clear each other would wait for
// ever, so the time must be limited.
func (m *Manager) clear(ctx context.Context, overlap *OverlapError, boot string) error {
	uid := overlap.Other.UID
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return errors.Join(overlap, err)
	}
	defer release()
	r, err := m.load(ctx, uid, boot)
	if err != nil {
		return errors.Join(overlap, err)
	}
	if r == nil || r.State == Prepared {
		return nil
	}
	klog.FromContext(ctx).Info("Cleaning up what another claim left", "other", r.Claim, "state", r.State)
	// What waits for another GPU is in nobody's way here.
	if err := m.unprepare(ctx, r, boot); err != nil && r.has(overlap.OtherDevice) {
		return errors.Join(overlap, err)
	}
	return nil
}
