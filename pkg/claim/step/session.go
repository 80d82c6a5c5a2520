// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// session is an MPS session on devices of the claim. It runs as long as a claim holds
// it, with the limits that its holders need.
type session struct {
	*Kit
	id string
}

// Check makes sure that somebody can start a session: later it would be too late to say
// that nothing was done.
func (e session) Check(s *Scene) error {
	if s.Attempt != First {
		return nil
	}
	return SupervisorHint(s.Supervisor)
}

func (e session) Apply(ctx context.Context, s *Scene) error {
	recorded := s.Record.Session(e.id)
	if err := e.dropStale(ctx, s.Record, recorded); err != nil {
		return SupervisorHint(err)
	}
	recorded.Resolve(s.Record)
	// One that another claim knows, also a claim that is being released, may have left
	// its compute mode.
	adopt := s.Attempt != First || journal.HoldSession(s.Others.Records, e.id) || s.Others.MayHoldSession(e.id) != ""
	holders := append(s.Others.Holders(), s.Record)
	live, err := e.converge(ctx, recorded, holders, adopt)
	if err != nil {
		if !errors.Is(err, sharing.ErrLeft) {
			err = notBegun(err)
		}
		return err
	}
	if !recorded.Running() {
		// Otherwise people have to be told first.
		recorded.Losses, recorded.Kills = live.Losses, live.Kills
	}
	recorded.PipeDir, recorded.ShmDir = live.PipeDir, live.ShmDir
	return nil
}

// dropStale ends the session of a partition that is gone, so that the next one can have
// its name.
func (e session) dropStale(ctx context.Context, r *journal.Record, recorded *journal.Session) error {
	resolved := *recorded
	resolved.Devices = slices.Clone(recorded.Devices)
	resolved.Resolve(r)
	for i, was := range recorded.Devices {
		if was.UUID != "" && was.UUID != resolved.Devices[i].UUID {
			return e.EndSession(ctx, sharing.Session{ID: e.id})
		}
	}
	return nil
}

func (e session) Undo(ctx context.Context, s *Scene) error {
	recorded := s.Record.Session(e.id)
	holders := s.Others.Holders()
	if !recorded.Shared || !journal.HoldSession(holders, e.id) {
		if recorded.Shared {
			if err := e.checkClients(ctx, s.Others); err != nil {
				return err
			}
		}
		_, err := e.converge(ctx, recorded, nil, true)
		return err
	}
	left := e.ofHolder(recorded, holders)
	if reflect.DeepEqual(left.Desired(append([]*journal.Record{s.Record}, holders...)), left.Desired(holders)) {
		return nil
	}
	// That the limits cannot be tightened is no reason to keep the claim, nor is a
	// supervisor that does not answer.
	_, err := e.Sessions(ctx)
	if err == nil {
		_, err = e.converge(ctx, left, holders, true)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The limits of an MPS session stay above what its claims have", "session", e.id)
	}
	return nil
}

// ofHolder returns the session as a remaining claim has recorded it: one that knows the
// partition, unless none does yet.
func (e session) ofHolder(own *journal.Session, holders []*journal.Record) *journal.Session {
	found := own
	for _, holder := range holders {
		if other := holder.Session(e.id); other != nil && (other.Devices[0].UUID != "" || own.Devices[0].UUID == "") {
			found = other
		}
	}
	return found
}

func (e session) Forget(r *journal.Record) { r.RemoveSession(e.id) }

// ErrUnclear means that nobody knows who uses something.
var ErrUnclear = errors.New("it may be used by a claim whose journal file cannot be read")

// checkClients keeps a session with clients that may be those of a claim whose record
// cannot be read.
func (e session) checkClients(ctx context.Context, others *journal.Snapshot) error {
	path := others.MayHoldSession(e.id)
	if path == "" {
		return nil
	}
	running, err := e.Sessions(ctx)
	if err != nil {
		return err
	}
	if clients := running[e.id].Clients; len(clients) > 0 {
		return fmt.Errorf("MPS session %s has the clients %v; %w (%s)", e.id, clients, ErrUnclear, path)
	}
	return nil
}

// converge brings a session to what the claims that hold it need; without any, to its
// end.
func (k *Kit) converge(ctx context.Context, s *journal.Session, holders []*journal.Record, adopt bool) (sharing.Live, error) {
	if len(holders) == 0 {
		return sharing.Live{}, k.EndSession(ctx, s.Desired(nil))
	}
	live, err := k.Sharing.Start(ctx, s.Desired(holders), adopt)
	return live, SupervisorHint(err)
}

// EndSession finds out first whether the supervisor answers at all. To end a session
// takes its time, and a supervisor that hangs must not hold up the pods that end.
func (k *Kit) EndSession(ctx context.Context, s sharing.Session) error {
	if _, err := k.Sessions(ctx); err != nil {
		return err
	}
	return k.Sharing.Stop(ctx, s)
}

// ConvergeSession brings a session that claims of the snapshot share to the limits that
// they need. The caller holds the locks of its GPUs.
func (k *Kit) ConvergeSession(ctx context.Context, s *journal.Session, holders []*journal.Record) (sharing.Live, error) {
	return k.converge(ctx, s, holders, true)
}

// sessionsTime bounds the question which MPS sessions there are. It goes to a
// process on this machine.
const sessionsTime = 2 * time.Second

// Sessions returns those that have devices, which one that is being removed may not. The
// error wraps sharing.ErrNoSupervisor when nobody answers.
func (k *Kit) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	limited, cancel := context.WithTimeout(ctx, sessionsTime)
	defer cancel()
	found, err := k.Sharing.Sessions(limited)
	if err != nil {
		if limited.Err() != nil && ctx.Err() == nil && !errors.Is(err, sharing.ErrNoSupervisor) {
			err = fmt.Errorf("%w within %s: %w", sharing.ErrNoSupervisor, sessionsTime, err)
		}
		return nil, err
	}
	maps.DeleteFunc(found, func(_ string, s mps.Status) bool { return len(s.Spec.Devices) == 0 })
	return found, nil
}

// SupervisorHint adds to an error what may help when nobody answers.
func SupervisorHint(err error) error {
	if errors.Is(err, sharing.ErrNoSupervisor) {
		return fmt.Errorf("%w: is the DaemonSet of the mps-supervisor running on this node?", err)
	}
	return err
}
