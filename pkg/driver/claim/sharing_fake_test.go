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

	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
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
	mps.Spec
	phase   mps.Phase
	losses  int
	kills   int
	starts  int
	clients []int
}

func (s *runningSession) status() mps.Status {
	return mps.Status{
		Spec: s.Spec, PipeDir: pipeOf(s.ID), ShmDir: shmOf(s.ID), Phase: s.phase, Servers: []int{4242}, Clients: s.clients,
		History: mps.History{Losses: s.losses, LastLoss: "the daemon ended", Kills: s.kills, LastKill: "one was killed"},
	}
}

func pipeOf(session string) string { return "/mps/" + session + "/pipe" }

func shmOf(session string) string { return "/mps/" + session + "/shm" }

func newShares() shares {
	return shares{sessions: map[string]*runningSession{}, exclusive: map[string]bool{}, intervals: map[string]sharing.Interval{}}
}

// Ensure makes a session run, or changes its limits. GPUs have to be in mode EXCLUSIVE_PROCESS before.
func (b *box) Ensure(ctx context.Context, s mps.Spec, devices []sharing.Device) (mps.Status, error) {
	if err := b.hear(ctx); err != nil {
		return mps.Status{}, err
	}
	b.mu.Lock()
	err := b.startable(s, devices)
	b.mu.Unlock()
	if err == nil {
		err = b.start(s)
	}
	if err != nil {
		return mps.Status{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sessions[s.ID].status(), nil
}

// startable needs the lock.
func (b *box) startable(s mps.Spec, devices []sharing.Device) error {
	if b.absent {
		return sharing.ErrNoSupervisor
	}
	for _, d := range devices {
		if err := b.answer(d.PCIAddress); err != nil {
			return err
		}
		if d.UUID == "" {
			return errors.New("a device without UUID")
		}
		if !b.exclusive[d.UUID] && !strings.HasPrefix(d.UUID, "MIG-") {
			return errors.New("the compute mode is not EXCLUSIVE_PROCESS")
		}
	}
	was := b.sessions[s.ID]
	if was != nil && (!slices.Equal(was.Devices, s.Devices) || was.MultiUser != s.MultiUser) {
		return fmt.Errorf("it runs with %v: %w", was.Devices, mps.ErrDiffers)
	}
	return nil
}

func (b *box) start(s mps.Spec) error {
	b.mu.Lock()
	was := b.sessions[s.ID]
	if was != nil {
		was.OnClientKilled = s.OnClientKilled
	}
	b.mu.Unlock()
	if was == nil {
		return b.effect("start session", func() error {
			b.sessions[s.ID] = &runningSession{Spec: s, phase: mps.Running, starts: 1}
			return nil
		})
	}
	if was.ClientPriority == s.ClientPriority && was.ThreadPercentage == s.ThreadPercentage && maps.Equal(was.Memory, s.Memory) {
		return nil
	}
	return b.effect("set limits", func() error { was.Spec = s; return nil })
}

// End ends a session.
func (b *box) End(ctx context.Context, id string) error {
	if err := b.hear(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	absent, dead := b.absent, b.dead
	was := b.sessions[id]
	b.mu.Unlock()
	switch {
	case dead:
		return errKilled
	case absent:
		return sharing.ErrNoSupervisor
	case was == nil:
		return nil
	}
	return b.effect("stop session", func() error { delete(b.sessions, id); return nil })
}

// Mode implements converge.Sharing.
func (b *box) Mode(_ context.Context, d sharing.Device) (gpu.ComputeMode, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.answer(d.PCIAddress); err != nil {
		return "", err
	}
	if b.exclusive[d.UUID] {
		return gpu.ComputeExclusiveProcess, nil
	}
	return gpu.ComputeDefault, nil
}

// SetExclusive implements converge.Sharing.
func (b *box) SetExclusive(_ context.Context, d sharing.Device, exclusive bool) error {
	b.mu.Lock()
	err := b.answer(d.PCIAddress)
	b.mu.Unlock()
	if err != nil {
		return err
	}
	name := "default mode"
	if exclusive {
		name = "exclusive mode"
	}
	return b.effect(name, func() error { b.exclusive[d.UUID] = exclusive; return nil })
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
		found[id] = s.status()
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

// serves tells whether a server holds a partition. It needs the lock.
func (s *shares) serves(compute []gpu.ComputeInstance) bool {
	for _, session := range s.sessions {
		if slices.ContainsFunc(compute, func(c gpu.ComputeInstance) bool { return slices.Contains(session.Devices, c.UUID) }) {
			return true
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
		all = append(all, fmt.Sprintf("session %s %v %d%% %v, start %d", id, session.Devices, session.ThreadPercentage, session.Memory, session.starts))
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
