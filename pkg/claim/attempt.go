// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// prepare takes all steps. The caller holds the claim's lock.
func (m *Manager) prepare(ctx context.Context, plan *Plan, earlier *Record, boot string) (*Record, error) {
	release, err := m.locks.gpus(ctx, plan.gpus())
	if err != nil {
		return nil, err
	}
	defer release()
	r := plan.record(boot)
	others, err := m.neighbours(r)
	if err != nil {
		return nil, err
	}
	if earlier != nil && earlier.State == Prepared {
		return m.verify(ctx, plan, earlier, others)
	}
	if err := others.checkOverlap(r); err != nil {
		return nil, err
	}
	quarantined, err := m.journal.quarantine.of(plan.Claim.UID, boot)
	if err != nil {
		return nil, err
	}
	// Otherwise an earlier attempt may have made any of the partitions.
	fresh := earlier == nil && len(quarantined) == 0
	if err := r.joinShares(plan, earlier, others); err != nil {
		return nil, err
	}
	if err := m.mayBegin(ctx, plan, r, others, fresh); err != nil {
		return nil, err
	}
	if err := m.journal.save(r); err != nil {
		if fresh {
			err = errors.Join(err, m.forget(r))
		}
		return nil, err
	}
	if begun, err := m.apply(ctx, plan, r, others, fresh); err != nil {
		if !fresh {
			begun = everything
		}
		return nil, m.undo(ctx, r, begun, err)
	}
	r.State = Prepared
	if err := m.journal.save(r); err != nil {
		return nil, m.undo(ctx, r, everything, err)
	}
	return r, nil
}

// joinShares brings a record into line with what was begun earlier, or with the other
// shares of its devices.
func (r *Record) joinShares(plan *Plan, earlier *Record, others *neighbours) error {
	if earlier != nil {
		r.resume(earlier)
		return nil
	}
	if err := others.checkRoom(plan, r); err != nil {
		return err
	}
	r.keepIntervals(others)
	return nil
}

// mayBegin finds out what can be known before anything is done. With fresh, nothing
// of the claim is there.
func (m *Manager) mayBegin(ctx context.Context, plan *Plan, r *Record, others *neighbours, fresh bool) error {
	err := m.checkPlaces(ctx, plan, r, others, fresh)
	if err == nil && len(r.Sessions) > 0 && fresh {
		// Later it would be too late to say that nothing was done.
		if _, err = m.sessions(ctx); err != nil {
			err = fmt.Errorf("device %s: %w", r.Sessions[0].Devices[0].Device, supervisorHint(err))
		}
	}
	if err != nil && fresh {
		return &tracelessError{err}
	}
	return err
}

// verify is the cheap way for a claim that is prepared: everything is looked up
// and the spec is written if it is missing. A failure undoes nothing, because
// containers may be running.
func (m *Manager) verify(ctx context.Context, plan *Plan, earlier *Record, others *neighbours) (*Record, error) {
	r := earlier.clone()
	err := m.expect(ctx, r, others)
	var told bool
	if err == nil {
		told, err = m.noteLosses(ctx, r, observed{})
	}
	if told {
		// Once is enough, whatever comes of the rest.
		err = m.journal.save(r)
	}
	if err == nil {
		_, err = m.apply(ctx, plan, r, others, false)
	}
	if err != nil {
		return nil, &tracelessError{fmt.Errorf("the claim was prepared before: %w", err)}
	}
	if r.sameResult(earlier) {
		return r, nil
	}
	klog.FromContext(ctx).Info("The claim was prepared before and is not what its record said, the record is brought up to date")
	return r, m.journal.save(r)
}

// expect makes sure that what is in the places of a prepared claim is the claim's.
// Before a partition that is gone is made again, the record stops saying which it
// was: otherwise a process that is killed then would take the new one for somebody
// else's.
func (m *Manager) expect(ctx context.Context, r *Record, others *neighbours) error {
	var gone []*DeviceRecord
	for i := range r.Devices {
		d := &r.Devices[i]
		if !d.made() || d.Partition.Live == nil {
			continue
		}
		state, err := m.partitions.State(ctx, d.PCIAddress)
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Device, err)
		}
		live, found := partition.Lookup(state, d.address())
		if err := others.checkShared(d, live, found); err != nil {
			return fmt.Errorf("device %s: %w", d.Device, err)
		}
		switch {
		case !found:
			d.Partition.Live = nil
			gone = append(gone, d)
		case live.UUID != d.Partition.Live.UUID:
			return fmt.Errorf("device %s: partition %s, which the claim had, is gone and %s, which this driver did not make, is in its place",
				d.Device, d.Partition.Live.UUID, live.UUID)
		}
	}
	if len(gone) == 0 {
		return nil
	}
	// As long as the record says what is gone this is tried again.
	if err := m.abandonSessions(ctx, r, gone); err != nil {
		return err
	}
	return m.journal.save(r)
}

// checkPlaces refuses a place with an instance that no record explains, whatever
// is in it: somebody else made it, and it must not be destroyed when the claim
// ends.
func (m *Manager) checkPlaces(ctx context.Context, plan *Plan, r *Record, others *neighbours, fresh bool) error {
	states := map[string]gpu.MIGState{}
	for n, step := range plan.Steps {
		d := &r.Devices[n]
		shared := d.sharedBy(others.records)
		if !step.creates() || !fresh && !shared {
			continue
		}
		at := step.address()
		state, known := states[at.PCIAddress]
		if !known {
			var err error
			if state, err = m.partitions.State(ctx, at.PCIAddress); err != nil {
				return fmt.Errorf("device %s: %w", step.Device.Name, err)
			}
			states[at.PCIAddress] = state
		}
		live, found := partition.Lookup(state, at)
		if err := others.checkShared(d, live, found); err != nil {
			return fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
		i := slices.IndexFunc(state.Instances, func(i gpu.Instance) bool {
			return d.isAt(i) && !slices.ContainsFunc(d.sharers(others.records), func(o owned) bool { return o.mayBe(i) })
		})
		if i >= 0 && fresh {
			return fmt.Errorf("device %s: GPU instance %d%s is there already and was not made by this driver; it is left alone%s",
				step.Device.Name, state.Instances[i].ID, uuidText(state.Instances[i]), others.mayHave())
		}
	}
	return nil
}

func uuidText(i gpu.Instance) string {
	if len(i.Compute) != 1 {
		return ""
	}
	return " (" + i.Compute[0].UUID + ")"
}

// creates tells whether a step makes a partition.
func (s Step) creates() bool {
	return s.Device.Partition != nil && s.Device.Static == nil && !s.Admin
}

// progress is how much of a claim was begun: of its devices, its sessions, and its
// time slices by device. What was not begun must not be undone either: it may be
// somebody else's.
type progress struct{ devices, sessions, intervals int }

var everything = progress{math.MaxInt, math.MaxInt, math.MaxInt}

// apply takes the steps, shares the devices, finds their nodes and writes the CDI
// spec. It fills in the record and returns what was begun. Unless it is fresh, an
// earlier attempt may have done any of it.
func (m *Manager) apply(ctx context.Context, plan *Plan, r *Record, others *neighbours, fresh bool) (begun progress, err error) {
	for i, step := range plan.Steps {
		begun.devices = i + 1
		live, err := m.take(ctx, step)
		if err == nil {
			err = r.Devices[i].becomes(live)
		}
		if err != nil {
			return begun, fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
	}
	if begun.sessions, err = m.startSessions(ctx, plan, r, others, !fresh); err != nil {
		return begun, err
	}
	if begun.intervals, err = m.setIntervals(ctx, r, others); err != nil {
		return begun, err
	}
	if err := m.limits.make(r, fresh); err != nil {
		return begun, err
	}
	devices, err := m.cdiDevices(r)
	if err != nil {
		return begun, err
	}
	ids, err := m.cdi.Write(ctx, r.Claim.UID, devices)
	if err != nil {
		return begun, err
	}
	for i := range r.Devices {
		id, found := ids[r.Devices[i].name()]
		if !found {
			return begun, fmt.Errorf("device %s: its CDI spec does not name it", r.Devices[i].Device)
		}
		r.Devices[i].CDIDevice = id
	}
	return begun, nil
}

// becomes notes what is live of a partition. A static one must stay the one that
// it was: nobody would know that a claim has got another.
func (d *DeviceRecord) becomes(live *partition.Live) error {
	if d.Partition == nil {
		return nil
	}
	if was := d.Partition.Live; d.Type == static && was != nil && was.UUID != live.UUID {
		return fmt.Errorf("partition %s, which the claim had, is gone and %s is in its place", was.UUID, live.UUID)
	}
	d.Partition.Live = live
	return nil
}

// take makes one device exist. It returns what is live of a partition.
func (m *Manager) take(ctx context.Context, step Step) (*partition.Live, error) {
	switch {
	case step.creates():
		live, err := m.partitions.Create(ctx, step.address(), step.dynamic())
		if err != nil {
			return nil, err
		}
		return &live, nil
	case step.Device.Partition != nil:
		return m.observe(ctx, step)
	case step.Admin || step.Device.GPU.MIG == nil:
		return nil, nil
	}
	return nil, m.partitions.EnsureWhole(ctx, step.Device.GPU.PCIAddress, step.dynamic())
}

// observe finds a partition that this claim does not make.
func (m *Manager) observe(ctx context.Context, step Step) (*partition.Live, error) {
	state, err := m.partitions.State(ctx, step.Device.GPU.PCIAddress)
	if err != nil {
		return nil, err
	}
	live, found := partition.Lookup(state, step.address())
	expected := step.Device.Static
	switch {
	case !found && expected != nil:
		return nil, fmt.Errorf("partition %s with %s was not made by this driver and is not there any more", expected.UUID, step.address())
	case !found:
		return nil, fmt.Errorf("there is no partition with %s now, and admin access does not make one", step.address())
	case expected != nil && live.UUID != expected.UUID:
		return nil, fmt.Errorf("partition %s was not made by this driver and is not there any more, %s is in its place", expected.UUID, live.UUID)
	}
	return &live, nil
}

// sameResult tells whether two records of the same devices say the same about
// what became of them.
func (r *Record) sameResult(other *Record) bool {
	for i := range r.Devices {
		a, b := &r.Devices[i], &other.Devices[i]
		if a.CDIDevice != b.CDIDevice {
			return false
		}
		if a.Partition != nil && (b.Partition.Live == nil || *a.Partition.Live != *b.Partition.Live) {
			return false
		}
	}
	for i := range r.Sessions {
		a, b := &r.Sessions[i], other.session(r.Sessions[i].ID)
		if b == nil || a.PipeDir != b.PipeDir || a.ShmDir != b.ShmDir || a.Losses != b.Losses || !slices.Equal(a.Devices, b.Devices) {
			return false
		}
	}
	return true
}

// undo takes back what was begun of a preparation that failed, and returns the error
// with what became of that. What it cannot take back stays written down as
// Unpreparing. The caller holds the locks of the claim and of its GPUs.
func (m *Manager) undo(ctx context.Context, r *Record, begun progress, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	left := m.destroy(ctx, r, r.Devices[:min(begun.devices, len(r.Devices))], begun)
	err := left.err()
	if err == nil {
		err = m.forget(r)
	} else {
		r.keep(left.devices())
	}
	if err == nil {
		return &tracelessError{cause}
	}
	r.State = Unpreparing
	return errors.Join(cause, fmt.Errorf("undo: %w", errors.Join(err, m.cdi.Remove(r.Claim.UID), m.journal.save(r))))
}
