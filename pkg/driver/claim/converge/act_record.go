// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// note writes into a claim's record what has become of its devices, and that the claim is prepared. The first device that is
// started makes the record.
func (w *work) note(ctx context.Context, actions []rules.Action) (err error) {
	a := actions[0]
	call, change := w.call(a), func(r *record.Record) error { return w.mark(ctx, r, actions) }
	if call != nil && (a.Kind == rules.Start || a.Kind == rules.Announce) {
		err = w.Store.Put(call.Wanted, change)
	} else {
		err = w.Store.Update(a.Claim, change)
	}
	if (a.Kind == rules.Unstart || a.Kind == rules.NoteSessions) && errors.Is(err, record.ErrNoRecord) {
		return nil // there is nothing to write it into
	}
	if err == nil && actions[len(actions)-1].Kind == rules.MarkPrepared {
		for address := range w.seen {
			w.inUse.Delete(address) // what was refused there before is over: processes on it belong to this claim
		}
	}
	return err
}

// mark changes a record if it is the one that was observed, or that of the call that is at work. Otherwise the error is ErrOutOfDate:
// where the record could not be read, a younger call may have written another one for other GPUs.
func (w *work) mark(ctx context.Context, r *record.Record, actions []rules.Action) error {
	a := actions[0]
	call, seen := w.call(a), w.seen[a.GPU].snapshot.Of(a.Claim)
	if (seen == nil || r.Arrived != seen.Arrived) && (call == nil || r.Arrived != call.Wanted.Arrived) {
		return record.ErrOutOfDate
	}
	for _, a := range actions {
		switch a.Kind {
		case rules.MarkPrepared:
			w.markPrepared(r, call)
			continue
		case rules.NoteSessions:
			w.noteSessions(ctx, r, seen, w.seen[a.GPU].sessions)
			continue
		}
		d := r.Device(a.Key)
		if d == nil {
			return fmt.Errorf("the record of claim %s has no device %s", r.Claim, a.Key)
		}
		d.Mark = marksOf[a.Kind]
		if a.Kind == rules.Start && d.Shared().Interval != a.Interval {
			// The GPU has that of its first share, whatever the policy says.
			d.Sharing = cmp.Or(d.Sharing, &record.Sharing{UUID: w.device(a).UUID})
			d.Sharing.Interval = a.Interval
		}
	}
	return nil
}

// markPrepared marks a claim as prepared, at the time when the call has arrived.
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

func noteRunning(s *record.Session, live mps.Status) {
	if !s.Running() {
		// Otherwise noteSessions makes events of the losses first.
		s.Losses, s.Kills = live.Losses, live.Kills
	}
	s.PipeDir, s.ShmDir = live.PipeDir, live.ShmDir
}

// noteSessions makes events about what has become of the MPS sessions of a prepared claim, and notes it so that this happens once.
func (w *work) noteSessions(ctx context.Context, r, seen *record.Record, sessions map[string]mps.Status) {
	warn := func(reason, format string, args ...any) { // again, if the record cannot be written after it
		w.Warn(ctx, r.Claim, reason, fmt.Sprintf(format, args...))
	}
	for i := range r.Sessions {
		// A task on another GPU of the claim may have noted something that is newer than this observation.
		if s := &r.Sessions[i]; r.State == record.Prepared && isSame(s, seen.Session(s.ID)) {
			noteNews(s, sessions, warn)
		}
	}
}

// isSame reports whether nobody has noted anything about a session since.
func isSame(a, b *record.Session) bool {
	return b != nil && a.PipeDir == b.PipeDir && a.Losses == b.Losses && a.Kills == b.Kills
}

// Reasons of events.
const (
	// ReasonMPSLost: the processes of a claim have lost their MPS server.
	ReasonMPSLost = "MPSServerLost"
	// ReasonMPSClientKilled: a client of a claim's MPS server was killed, and the others go
	// on with a server whose state is undefined.
	ReasonMPSClientKilled = "MPSClientKilled"
)

// hasNews reports whether a record does not say what has become of a session: it may also run again.
func hasNews(s record.Session, found map[string]mps.Status) bool {
	was := s
	noteNews(&s, found, func(string, string, ...any) {})
	return !isSame(&s, &was)
}

// noteNews says what has become of a session, and writes it into its record.
func noteNews(s *record.Session, found map[string]mps.Status, warn func(reason, format string, args ...any)) {
	was := *s
	status, runs := found[s.ID]
	if !s.Running() {
		noteRunning(s, status)
		return
	}
	if status.Kills > was.Kills {
		warn(ReasonMPSClientKilled, "Device %s: %s. NVIDIA calls the state of an MPS server undefined after that: the processes that share it may hang, fail "+
			"or get wrong results. It is replaced when all of them have ended. To be safe, restart them.", s.Devices[0].Device, status.LastKill)
	}
	s.Losses, s.Kills = status.Losses, status.Kills
	why := status.LastLoss
	switch {
	case !runs:
		why, s.PipeDir, s.ShmDir = "it was gone", "", ""
	case s.Losses == was.Losses:
		return
	case s.Losses < was.Losses:
		why = "it was gone and was started again"
	}
	warn(ReasonMPSLost, "Device %s: processes have lost their MPS server: %s. Those that used it have failed. "+
		"Containers that have not ended because of that must be restarted: delete their pods.", s.Devices[0].Device, why)
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

// resolve fills in the present UUIDs and IDs of a record's partitions, and the folders of its sessions that run.
func (w *work) resolve(r *record.Record) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Partition == nil {
			continue
		}
		if o := w.seen[d.PCIAddress]; o != nil {
			if live, made := partition.Lookup(o.Hardware.MIGState, d.Address()); made {
				d.Partition.Made = &live
			}
		}
	}
	for i := range r.Sessions {
		for _, o := range w.seen {
			if live, runs := o.sessions[r.Sessions[i].ID]; runs {
				noteRunning(&r.Sessions[i], live)
			}
		}
	}
}

func (w *work) writeSpec(ctx context.Context, a rules.Action) (err error) {
	r, err := w.resolved(a)
	if err != nil {
		return err
	}
	w.arrived = r.Arrived
	if call := w.call(a); call != nil {
		w.arrived = call.Wanted.Arrived // the record may be older
	} else {
		// Nobody ends this when the claim is released: the driver's folder must not keep the GPU.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, specsTime)
		defer cancel()
	}
	w.ids, err = w.Specs.Write(ctx, r)
	return err
}

// clear notes that nothing is left of a claim on a GPU. If the record cannot be written, the release is due again later, and
// finds nothing to do.
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
	want := mps.Spec{ID: s.ID, MultiUser: s.MultiUser, ClientPriority: mps.ClientPriority(s.ClientPriority), ThreadPercentage: s.Percent, Memory: map[string]int64{}}
	var devices []sharing.Device
	for i := range s.Devices {
		d := &s.Devices[i]
		uuid := d.UUID
		if at := slices.IndexFunc(r.Devices, func(of record.Device) bool { return of.Device == d.Device && of.Partition != nil }); at >= 0 {
			uuid = r.Devices[at].Partition.UUID() // it had none before it was made
		}
		if uuid == "" {
			return fmt.Errorf("MPS session %s: device %s has no UUID", s.ID, d.Device)
		}
		want.Devices, devices = append(want.Devices, uuid), append(devices, sharing.Device{PCIAddress: d.PCIAddress, UUID: uuid})
		if bytes := max(d.MemoryBytes, a.Demand.MemoryBytes); bytes > 0 {
			want.Memory[uuid] = bytes
		}
	}
	if s.Shared {
		want.ThreadPercentage, want.ClientPriority = a.Demand.Percent, mps.ClientPriority(a.Demand.Priority)
		if a.Demand.OnClientKilled == policy.KilledRestart {
			want.OnClientKilled = mps.RestartServer
		}
	}
	live, err := w.Sharing.Ensure(ctx, want, devices)
	switch {
	case err == nil:
		for _, o := range w.seen {
			o.sessions[s.ID] = live
		}
	case errors.Is(err, gpu.ErrInUse):
		// In front: what MPS says is long, and cut somewhere.
		err = fmt.Errorf("GPU %s is held by %s: %w", a.GPU, w.Partitions.Holders(ctx, a.GPU), err)
	}
	return err
}
