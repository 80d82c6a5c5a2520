// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// shares is what is done to share the devices of a box, behind its lock.
type shares struct {
	sessions map[string]*runningSession
	// exclusive are the compute modes and intervals the time slices, by UUID.
	exclusive map[string]bool
	intervals map[string]sharing.Interval
	// absent: there is no supervisor. mute: it takes calls and does not answer.
	absent, mute bool
	// onSessions runs before each answer, with the lock.
	onSessions func()
}

// runningSession is one that the supervisor runs.
type runningSession struct {
	sharing.Session
	phase   mps.Phase
	losses  int
	kills   int
	starts  int
	clients []int
}

func newShares() shares {
	return shares{sessions: map[string]*runningSession{}, exclusive: map[string]bool{}, intervals: map[string]sharing.Interval{}}
}

// Start does what package sharing promises: completely or not at all, or it says
// that it has left something.
func (b *box) Start(ctx context.Context, s sharing.Session, adopt bool) (sharing.Live, error) {
	if err := b.hear(ctx); err != nil {
		return sharing.Live{}, err
	}
	b.mu.Lock()
	err := b.startable(s, adopt)
	was := b.sessions[s.ID]
	b.mu.Unlock()
	if err != nil {
		return sharing.Live{}, err
	}
	if err := b.start(s); err != nil {
		if was != nil {
			return sharing.Live{}, err
		}
		if left := b.Stop(ctx, s); left != nil {
			err = errors.Join(err, sharing.ErrLeft, left)
		}
		return sharing.Live{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return sharing.Live{PipeDir: "/mps/" + s.ID + "/pipe", ShmDir: "/mps/" + s.ID + "/shm", Losses: b.sessions[s.ID].losses, Kills: b.sessions[s.ID].kills}, nil
}

// startable needs the lock.
func (b *box) startable(s sharing.Session, adopt bool) error {
	if b.absent {
		return sharing.ErrNoSupervisor
	}
	for _, d := range s.Devices {
		if err := b.answer(d.PCIAddress); err != nil {
			return err
		}
		if d.UUID == "" {
			return errors.New("a device without UUID")
		}
		if b.exclusive[d.UUID] && !adopt && b.sessions[s.ID] == nil {
			return errors.New("the mode is somebody else's")
		}
	}
	was := b.sessions[s.ID]
	if was != nil && (!slices.Equal(was.Devices, s.Devices) || was.MultiUser != s.MultiUser) {
		return fmt.Errorf("it runs with %v: %w", was.Devices, mps.ErrDiffers)
	}
	return nil
}

func (b *box) start(s sharing.Session) error {
	if !b.modesAre(s, true) {
		if err := b.effect("exclusive mode", func() error { b.setModes(s, true); return nil }); err != nil {
			return err
		}
	}
	b.mu.Lock()
	was := b.sessions[s.ID]
	if was != nil {
		was.OnClientKilled = s.OnClientKilled
	}
	b.mu.Unlock()
	if was == nil {
		return b.effect("start session", func() error {
			b.sessions[s.ID] = &runningSession{Session: s, phase: mps.Running, starts: 1}
			return nil
		})
	}
	if was.ClientPriority == s.ClientPriority && was.Limits.ThreadPercentage == s.Limits.ThreadPercentage && maps.Equal(was.Limits.MemoryBytes, s.Limits.MemoryBytes) {
		return nil
	}
	return b.effect("set limits", func() error { was.Limits, was.ClientPriority = s.Limits, s.ClientPriority; return nil })
}

func (b *box) Stop(ctx context.Context, s sharing.Session) error {
	if err := b.hear(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	absent, dead := b.absent, b.dead
	was := b.sessions[s.ID]
	b.mu.Unlock()
	if dead {
		return errKilled
	}
	if absent {
		return sharing.ErrNoSupervisor
	}
	if was != nil {
		if err := b.effect("stop session", func() error { delete(b.sessions, s.ID); return nil }); err != nil {
			return err
		}
	}
	if b.modesAre(s, false) {
		return nil
	}
	return b.effect("default mode", func() error { b.setModes(s, false); return nil })
}

// hear waits for as long as the caller does for a supervisor that does not answer.
func (b *box) hear(ctx context.Context) error {
	b.mu.Lock()
	mute := b.mute
	b.mu.Unlock()
	if !mute {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (b *box) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	if err := b.hear(ctx); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.onSessions != nil {
		b.onSessions()
	}
	if b.absent {
		return nil, sharing.ErrNoSupervisor
	}
	found := map[string]mps.Status{}
	for id, s := range b.sessions {
		spec := mps.Spec{ID: id, MultiUser: s.MultiUser, ThreadPercentage: s.Limits.ThreadPercentage, Memory: s.Limits.MemoryBytes,
			ClientPriority: mps.ClientPriority(s.ClientPriority)}
		for _, d := range s.Devices {
			spec.Devices = append(spec.Devices, d.UUID)
		}
		found[id] = mps.Status{Spec: spec, Phase: s.phase, Losses: s.losses, LastLoss: "the daemon ended", Kills: s.kills, LastKill: "one was killed", Servers: []int{4242}, Clients: s.clients}
	}
	return found, nil
}

func (b *box) SetInterval(_ context.Context, d sharing.Device, interval sharing.Interval) error {
	b.mu.Lock()
	err := b.answer(d.PCIAddress)
	same := b.intervals[d.UUID] == interval || interval == policy.IntervalDefault && b.intervals[d.UUID] == ""
	b.mu.Unlock()
	if err != nil || same {
		return err
	}
	if d.UUID == "" {
		return fmt.Errorf("no UUID: %w", gpu.ErrInvalid)
	}
	return b.effect("interval "+string(interval), func() error {
		b.intervals[d.UUID] = interval
		if interval == policy.IntervalDefault {
			delete(b.intervals, d.UUID)
		}
		return nil
	})
}

// setModes needs the lock.
func (b *box) setModes(s sharing.Session, exclusive bool) {
	for _, d := range s.Devices {
		b.exclusive[d.UUID] = exclusive
	}
}

func (b *box) modesAre(s sharing.Session, exclusive bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !slices.ContainsFunc(s.Devices, func(d sharing.Device) bool { return b.exclusive[d.UUID] != exclusive })
}

// serves tells whether a server holds a partition. It needs the lock.
func (s *shares) serves(compute []gpu.ComputeInstance) bool {
	for _, session := range s.sessions {
		for _, d := range session.Devices {
			if slices.ContainsFunc(compute, func(c gpu.ComputeInstance) bool { return c.UUID == d.UUID }) {
				return true
			}
		}
	}
	return false
}

// running finds a session, or nil.
func (b *box) running(id string) *runningSession {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sessions[id]
}

// lose makes the clients of a session lose their server.
func (b *box) lose(id string, phase mps.Phase) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sessions[id].losses++
	b.sessions[id].phase = phase
}

func (b *box) away(absent bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.absent = absent
}

// list is what is there for people to compare. It needs the lock. Of a session the
// number of starts counts: its clients must not notice others.
func (s *shares) list() []string {
	var all []string
	for id, session := range s.sessions {
		all = append(all, fmt.Sprintf("session %s %v %d%% %v, start %d", id, session.Devices, session.Limits.ThreadPercentage, session.Limits.MemoryBytes, session.starts))
	}
	for uuid, exclusive := range s.exclusive {
		if exclusive {
			all = append(all, "exclusive mode of "+uuid)
		}
	}
	for uuid, interval := range s.intervals {
		all = append(all, fmt.Sprintf("interval %s of %s", interval, uuid))
	}
	return all
}
