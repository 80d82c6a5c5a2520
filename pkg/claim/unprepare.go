// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/sharing"
)

// errPending says that the rest has to wait for the driver or the GPU.
var errPending = errors.New("the rest waits until the hardware answers")

// Unprepare releases everything that a claim has. It needs the journal only: no
// inventory, no allocation. A claim without a record is a success.
//
// Without a driver, or with the GPU off the bus, hanging or to be reset, the CDI
// spec goes and the record stays: the call succeeds, so that pods can end, and Reconcile or the
// next claim for the place does the rest.
// A damaged record gives a *CorruptError once; the next call succeeds.
//
// From then on a Prepare that arrived before this call is refused, see [Arrived].
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	arrived := m.arrival(ctx)
	if err := checkUID(uid); err != nil {
		return err
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return err
	}
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	err = m.unprepareUID(ctx, uid, boot)
	if errors.Is(err, errPending) {
		klog.FromContext(ctx).Info("The claim's partitions are destroyed when the hardware answers", "reason", err)
		err = nil
	}
	// Also after a failure: the claim is not wanted any more.
	return errors.Join(err, m.released.put(uid, boot, arrived))
}

func (m *Manager) unprepareUID(ctx context.Context, uid types.UID, boot string) error {
	r, err := m.load(ctx, uid, boot)
	var corrupt *CorruptError
	switch {
	case errors.As(err, &corrupt):
		return errors.Join(err, m.cdi.Remove(uid), m.limits.drop(uid))
	case err != nil:
		return err
	case r == nil:
		// Also what a process left that was killed before its first record.
		return errors.Join(m.cdi.Remove(uid), m.limits.drop(uid), m.journal.delete(uid))
	}
	return m.unprepare(ctx, r, boot)
}

// unprepare releases what a record holds. The caller holds the claim's lock. The
// error wraps errPending when all that is left waits for the hardware.
func (m *Manager) unprepare(ctx context.Context, r *Record, boot string) error {
	if r.State != Unpreparing {
		r.State = Unpreparing
		if err := m.journal.save(r); err != nil {
			return err
		}
	}
	if r.BootID != boot {
		// Its instances are gone, and another claim's may be in their place.
		return m.forget(r)
	}
	left := m.release(ctx, r)
	err := left.err()
	if err == nil {
		return m.forget(r)
	}
	failed := m.reduce(r, left)
	if !errors.Is(err, errPending) {
		return errors.Join(err, failed)
	}
	if failed = errors.Join(failed, m.cdi.Remove(r.Claim.UID)); failed != nil {
		return fmt.Errorf("%w (besides: %s)", failed, err.Error())
	}
	return err
}

// reduce leaves in a record what could not be removed: the places of the other
// devices are free for the next claim.
func (m *Manager) reduce(r *Record, left leftovers) error {
	if len(left) == len(r.Devices) {
		return nil
	}
	rest := r.clone()
	rest.keep(left.devices())
	if err := m.journal.save(rest); err != nil {
		return err
	}
	*r = *rest
	return nil
}

// keep leaves only these devices in the record, and the sessions that they are in.
func (r *Record) keep(devices []DeviceRecord) {
	r.Devices = devices
	r.Sessions = slices.DeleteFunc(r.Sessions, func(s SessionRecord) bool { return !heldBy([]*Record{r}, s.ID) })
}

// forget removes the traces of a claim that has nothing on the hardware.
func (m *Manager) forget(r *Record) error {
	if err := errors.Join(m.cdi.Remove(r.Claim.UID), m.limits.drop(r.Claim.UID)); err != nil {
		return err
	}
	return m.journal.delete(r.Claim.UID)
}

// busyTime bounds the wait for one GPU of a claim that is released. Another process
// may hold it until a call returns that never does, and that cannot be seen from
// here; the claim's other GPUs and the end of its pod must not wait for it.
const busyTime = 10 * time.Second

// leftovers are the devices that could not be released, and why.
type leftovers []leftover

type leftover struct {
	device DeviceRecord
	err    error
}

func (l leftovers) devices() []DeviceRecord {
	var devices []DeviceRecord
	for _, one := range l {
		devices = append(devices, one.device)
	}
	return devices
}

// err is nil when nothing is left, and wraps errPending when all of it waits for
// the hardware.
func (l leftovers) err() error {
	if len(l) == 0 {
		return nil
	}
	pending := true
	var errs []error
	for _, one := range l {
		pending = pending && absent(one.err)
		errs = append(errs, fmt.Errorf("device %s: %w", one.device.Device, one.err))
	}
	if pending {
		return fmt.Errorf("%w: %w", errPending, errors.Join(errs...))
	}
	return errors.Join(errs...)
}

// release removes what a claim has on the hardware, group by group: a GPU that
// hangs does not keep the others locked.
func (m *Manager) release(ctx context.Context, r *Record) leftovers {
	var left leftovers
	for _, group := range r.groups() {
		unlock, err := m.lockSoon(ctx, group.gpus)
		if err != nil {
			for _, d := range group.devices {
				left = append(left, leftover{d, err})
			}
			continue
		}
		left = append(left, m.destroy(ctx, r, group.devices, everything)...)
		unlock()
	}
	return left
}

// group are devices that are released together, and their GPUs: those of one GPU,
// and those of several that are in one MPS session.
type group struct {
	gpus    []string
	devices []DeviceRecord
}

// groups of the devices with something to remove, by their first GPU.
func (r *Record) groups() []group {
	var groups []group
	for _, d := range r.Devices {
		if d.releasable() {
			groups = append(groups, group{gpus: r.lockedFor(d), devices: []DeviceRecord{d}})
		}
	}
	for i := 0; i < len(groups); i++ {
		for j := i + 1; j < len(groups); j++ {
			if !overlap(groups[i].gpus, groups[j].gpus) {
				continue
			}
			groups[i].gpus = inOrder(append(groups[i].gpus, groups[j].gpus...))
			groups[i].devices = append(groups[i].devices, groups[j].devices...)
			groups = slices.Delete(groups, j, j+1)
			j = i // the group has more GPUs now
		}
	}
	slices.SortFunc(groups, func(a, b group) int { return comparePCI(a.gpus[0], b.gpus[0]) })
	return groups
}

// lockedFor are the GPUs that have to be locked to release a device.
func (r *Record) lockedFor(d DeviceRecord) []string {
	gpus := []string{d.PCIAddress}
	if d.Sharing != nil {
		if s := r.session(d.Sharing.Session); s != nil {
			gpus = append(gpus, s.pciAddresses()...)
		}
	}
	return inOrder(gpus)
}

func overlap(a, b []string) bool {
	return slices.ContainsFunc(a, func(address string) bool { return slices.Contains(b, address) })
}

// lockSoon waits no longer than busyTime, nor than ctx.
func (m *Manager) lockSoon(ctx context.Context, pciAddresses []string) (func(), error) {
	ctx, cancel := context.WithTimeout(ctx, busyTime)
	defer cancel()
	return m.locks.gpus(ctx, pciAddresses)
}

// destroy removes what was begun on these devices of a claim, which are all that it
// has or the first ones, last to first. What cannot be removed does not keep the rest,
// except what it is made on. The caller holds the locks of the GPUs.
func (m *Manager) destroy(ctx context.Context, r *Record, devices []DeviceRecord, begun progress) leftovers {
	others := &neighbours{}
	if slices.ContainsFunc(devices, func(d DeviceRecord) bool { return d.isShare() }) {
		var err error
		if others, err = m.neighbours(r); err != nil {
			return allLeft(devices, err)
		}
	}
	failed := make([]error, len(devices))
	for i := range min(begun.intervals, len(devices)) {
		failed[i] = m.resetInterval(ctx, &devices[i], others)
	}
	stopped := m.stopSessions(ctx, r, devices, others, begun.sessions)
	holders := others.holders()
	var left leftovers
	for i, d := range slices.Backward(devices) {
		if !d.releasable() {
			continue
		}
		err := failed[i]
		if d.Sharing != nil {
			err = errors.Join(err, stopped[d.Sharing.Session])
		}
		if err == nil && d.made() && !d.sharedBy(holders) {
			err = m.partitions.Destroy(ctx, d.address(), d.Partition.uuid(), d.DynamicMIG)
		}
		if err != nil {
			left = append(left, leftover{d, err})
		}
	}
	slices.Reverse(left)
	return left
}

// stopSessions ends those of the first sessions of a claim that these devices are
// in, and returns by ID what went wrong.
func (m *Manager) stopSessions(ctx context.Context, r *Record, devices []DeviceRecord, others *neighbours, begun int) map[string]error {
	errs := map[string]error{}
	for i := range min(begun, len(r.Sessions)) {
		s := &r.Sessions[i]
		if slices.ContainsFunc(devices, func(d DeviceRecord) bool { return d.in(s.ID) }) {
			errs[s.ID] = m.stopSession(ctx, r, s, others)
		}
	}
	return errs
}

func allLeft(devices []DeviceRecord, err error) leftovers {
	var left leftovers
	for _, d := range devices {
		if d.releasable() {
			left = append(left, leftover{d, err})
		}
	}
	return left
}

// waits are the reasons for which a release ends later: there is nothing to talk to
// (no driver, no supervisor, no such GPU, or one that hangs or does nothing until it
// is reset), or somebody else is not done. Pods that cannot end would keep it so. An
// instance that does not exist is no error of Destroy.
var waits = []error{
	gpu.ErrDriverNotLoaded, gpu.ErrLost, gpu.ErrNotFound, gpu.ErrHung, gpu.ErrResetRequired,
	sharing.ErrNoSupervisor, errNoProgram, errBusy, errUnclear,
}

func absent(err error) bool {
	return slices.ContainsFunc(waits, func(reason error) bool { return errors.Is(err, reason) })
}
