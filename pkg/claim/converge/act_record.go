// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
	"github.com/partage-dev/partage/pkg/steptime"
)

// note writes down what has become of a claim's devices, and that all of it is there. The record is made with the first one
// that is started.
func (w *work) note(actions []rules.Action) (err error) {
	a := actions[0]
	call := w.call(a.Claim)
	change := func(r *record.Record) error {
		for _, a := range actions {
			if a.Do == rules.MarkPrepared {
				w.markPrepared(r, call)
				continue
			}
			d := r.Device(a.Key)
			if d == nil {
				return fmt.Errorf("the record of claim %s has no device %s", r.Claim, a.Key)
			}
			d.Mark = marksOf[a.Do]
			if a.Do == rules.Start {
				noteInterval(d, a.Interval, w.device(a).UUID)
			}
		}
		return nil
	}
	if call != nil && (a.Do == rules.Start || a.Do == rules.Announce) {
		err = w.Store.Put(call.Wanted, change)
	} else {
		err = w.Store.Update(a.Claim, change)
	}
	if a.Do == rules.Unstart && errors.Is(err, record.ErrNoRecord) {
		return nil // nothing of it is there
	}
	if w.noted = err == nil && actions[len(actions)-1].Do == rules.MarkPrepared; w.noted {
		for address := range w.seen {
			w.Failures.NotInUse(address) // what was refused there before is over: processes on it belong to this claim
		}
	}
	return err
}

// noteInterval notes the time slice that the GPU has for a share: that of its first share, whatever the policy says.
func noteInterval(d *record.Device, interval policy.Interval, uuid string) {
	if d.Shared().Interval == interval {
		return
	}
	if d.Sharing == nil {
		d.Sharing = &record.Sharing{UUID: uuid}
	}
	d.Sharing.Interval = interval
}

// markPrepared says that all of a claim is there, and that it is as young as the call.
func (w *work) markPrepared(r *record.Record, call *Call) {
	r.State = record.Prepared
	if call != nil {
		r.Arrived = call.Wanted.Arrived
	}
	for i := range r.Devices {
		if id := w.ids[r.Devices[i].Key()]; id != "" {
			r.Devices[i].CDIDevice = id
		}
	}
	w.resolve(r)
}

// noteSessions writes down the folders of the claim's sessions: those that this task has started, and those that run.
func (w *work) noteSessions(r *record.Record) {
	for i := range r.Sessions {
		s := &r.Sessions[i]
		live, runs := w.sessions[s.ID]
		for _, o := range w.seen {
			if status, seen := o.sessions[s.ID]; seen && !runs {
				live, runs = sharing.Live{PipeDir: status.PipeDir, ShmDir: status.ShmDir, Losses: status.Losses, Kills: status.Kills}, true
			}
		}
		if !runs {
			continue
		}
		if !s.Running() {
			// Otherwise people have to be told of losses first.
			s.Losses, s.Kills = live.Losses, live.Kills
		}
		s.PipeDir, s.ShmDir = live.PipeDir, live.ShmDir
	}
}

// keepSessions writes down the sessions that a task has started: for its claim, unless that is done, and for those that
// share them and were told that they were gone.
func (w *work) keepSessions() error {
	if len(w.sessions) == 0 {
		return nil
	}
	hasAgain := func(s record.Session) bool {
		_, started := w.sessions[s.ID]
		return started && !s.Running()
	}
	claims := map[types.UID]bool{w.task.Claim: w.task.Claim != "" && !w.noted}
	for _, o := range w.seen {
		for _, r := range o.snapshot.Records {
			claims[r.Claim.UID] = claims[r.Claim.UID] || r.Claim.UID != w.task.Claim && r.State == record.Prepared && slices.ContainsFunc(r.Sessions, hasAgain)
		}
	}
	var errs []error
	for uid, is := range claims {
		if !is {
			continue
		}
		err := w.Store.Update(uid, func(r *record.Record) error { w.noteSessions(r); return nil })
		if !errors.Is(err, record.ErrNoRecord) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// resolved returns the claim's record with its partitions as they are now, and its sessions.
func (w *work) resolved(a rules.Action) (*record.Record, error) {
	r := w.record(a)
	if r == nil {
		return nil, fmt.Errorf("claim %s has no record any more", a.Claim)
	}
	r = r.Clone()
	w.resolve(r)
	return r, nil
}

// resolve says of a record's partitions what they are now, and of its sessions.
func (w *work) resolve(r *record.Record) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Partition == nil {
			continue
		}
		live, made := w.instances[d.Address()]
		if o := w.seen[d.PCIAddress]; o != nil && !made {
			live, made = partition.Lookup(o.state, d.Address())
		}
		if made {
			d.Partition.Made = &live
		}
	}
	w.noteSessions(r)
}

func (w *work) writeSpec(ctx context.Context, a rules.Action) (err error) {
	r, err := w.resolved(a)
	if err != nil {
		return err
	}
	if w.call(a.Claim) == nil {
		// Nobody ends this when the claim is released: the driver's folder must not keep the GPU.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, specsTime)
		defer cancel()
	}
	w.ids, err = w.Specs.Write(ctx, r)
	return err
}

// clear notes that nothing is left of a claim on a GPU. Where the disk refuses it is done again when that is due, and finds
// nothing to do.
func (w *work) clear(ctx context.Context, a rules.Action) {
	defer steptime.Of(ctx).Begin(steptime.Journal)()
	err := w.Store.Clear(a.Claim, a.GPU)
	if err != nil {
		err = w.Store.Clear(a.Claim, a.GPU) // it may have been for a moment
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "What is released is not written down", "claimUID", a.Claim)
	}
}

// startSession makes a session run as its claims need it. Its devices have their UUIDs by now.
func (w *work) startSession(ctx context.Context, a rules.Action) error {
	r, err := w.resolved(a)
	if err != nil {
		return err
	}
	s := r.Session(a.Session)
	if s == nil {
		return fmt.Errorf("the record of claim %s says nothing of MPS session %s", r.Claim, a.Session)
	}
	want := sharing.Session{ID: s.ID, MultiUser: s.MultiUser, ClientPriority: s.ClientPriority}
	want.Limits.ThreadPercentage = s.Percent
	memory := map[string]int64{}
	for i := range s.Devices {
		d := &s.Devices[i]
		uuid := uuidIn(r, d)
		if uuid == "" {
			return fmt.Errorf("MPS session %s: device %s has no UUID", s.ID, d.Device)
		}
		want.Devices = append(want.Devices, sharing.Device{PCIAddress: d.PCIAddress, UUID: uuid})
		if bytes := max(d.MemoryBytes, a.Demand.MemoryBytes); bytes > 0 {
			memory[uuid] = bytes
		}
	}
	if len(memory) > 0 {
		want.Limits.MemoryBytes = memory
	}
	if s.Shared {
		want.Limits.ThreadPercentage, want.ClientPriority = a.Demand.Percent, priorityOf(a.Demand)
		if a.Demand.Restart {
			want.OnClientKilled = policy.KilledRestart
		}
	}
	live, err := w.Sharing.Ensure(ctx, want)
	switch {
	case err == nil:
		w.sessions[s.ID] = live
	case errors.Is(err, gpu.ErrInUse):
		// In front: what MPS says is long, and cut somewhere.
		err = fmt.Errorf("GPU %s is held by %s: %w", a.GPU, w.Partitions.Holders(ctx, a.GPU), err)
	}
	return err
}

// priorityOf is the highest among the shares of a session, or nothing if all are normal, which needs no MPS that has
// priorities. Those with a lower one have it in their environment as well.
func priorityOf(d rules.Demand) policy.ClientPriority {
	switch {
	case d.BelowNormal:
		return policy.PriorityBelowNormal
	case d.Priorities:
		return policy.PriorityNormal
	}
	return ""
}

// uuidIn is that of a device of a session: a partition has none before it is made.
func uuidIn(r *record.Record, d *record.SessionDevice) string {
	for i := range r.Devices {
		o := &r.Devices[i]
		if o.Device != d.Device || o.Partition == nil {
			continue
		}
		if o.Partition.Made == nil {
			return ""
		}
		return o.Partition.Made.UUID
	}
	return d.UUID
}
