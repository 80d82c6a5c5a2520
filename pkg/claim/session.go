// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/sharing"
)

// SharingRecord is what is done to share a device.
type SharingRecord struct {
	// UUID is the GPU's.
	UUID string `json:"uuid"`
	// Session is the ID of the MPS session that the device is in, or empty.
	Session string `json:"session,omitempty"`
	// Limits are the claim's, of a share.
	Limits Limits `json:"limits,omitzero"`
	// Interval is the time slice that the GPU has for the claim, or empty.
	Interval sharing.Interval `json:"interval,omitempty"`
	// Limited says that an interposer library holds the claim to its limits.
	Limited bool `json:"limited,omitempty"`
}

// SessionRecord is an MPS session that devices of a claim are in.
type SessionRecord struct {
	ID string `json:"id"`
	// Shared says that claims have shares of it: its limits are the largest among
	// theirs, and it ends with the last. Otherwise it is the claim's own.
	Shared bool `json:"shared,omitempty"`
	// Devices have no UUID before a partition exists.
	Devices   []SessionDevice `json:"devices"`
	MultiUser bool            `json:"multiUser,omitempty"`
	// Percent and MemoryBytes (by UUID) are the limits of the claim's own session.
	Percent     int              `json:"percent,omitempty"`
	MemoryBytes map[string]int64 `json:"memoryBytes,omitempty"`

	// The rest is empty until it runs. Losses is how often its clients had lost
	// their server by then, or when that was told last.
	PipeDir string `json:"pipeDir,omitempty"`
	ShmDir  string `json:"shmDir,omitempty"`
	Losses  int    `json:"losses,omitempty"`
}

// SessionDevice is a GPU or a partition in a session.
type SessionDevice struct {
	Device     string `json:"device"`
	PCIAddress string `json:"pciAddress"`
	UUID       string `json:"uuid,omitempty"`
}

// record is nil for a step that shares nothing.
func (s Step) record() *SharingRecord {
	r := &SharingRecord{UUID: s.Device.GPU.UUID, Limits: s.Limits, Interval: s.interval}
	if s.session != nil {
		r.Session = s.session.id
	}
	if s.Device.Share != nil {
		r.Limited = s.Device.Share.Limited && !s.Admin
	}
	if r.Session == "" && r.Interval == "" && !r.Limited {
		return nil
	}
	return r
}

// join puts the device of a step into its session.
func (r *Record) join(s Step) {
	if s.session == nil {
		return
	}
	session := r.session(s.session.id)
	if session == nil {
		r.Sessions = append(r.Sessions, SessionRecord{ID: s.session.id, Shared: s.Device.Share != nil, MultiUser: s.session.multiUser})
		session = &r.Sessions[len(r.Sessions)-1]
		if s.session.config != nil {
			session.Percent = s.session.config.ThreadPercentage()
		}
	}
	d := SessionDevice{Device: s.Device.Name, PCIAddress: s.Device.GPU.PCIAddress, UUID: s.Device.GPU.UUID}
	if s.Device.Partition != nil {
		d.UUID = ""
	}
	// Two shares of one device are in the session once.
	if !slices.ContainsFunc(session.Devices, func(other SessionDevice) bool { return other.Device == d.Device }) {
		session.Devices = append(session.Devices, d)
	}
}

// resume goes on with what an earlier attempt has begun. It has to be taken back as
// it was written down, whatever the policy says by now.
func (r *Record) resume(earlier *Record) {
	for i := range r.Devices {
		r.Devices[i].Sharing = earlier.Devices[i].Sharing
	}
	r.Sessions = earlier.Sessions
}

// session finds the record of a session, or nil.
func (r *Record) session(id string) *SessionRecord {
	for i := range r.Sessions {
		if r.Sessions[i].ID == id {
			return &r.Sessions[i]
		}
	}
	return nil
}

// in tells whether a device is in a session.
func (d *DeviceRecord) in(id string) bool {
	return d.Sharing != nil && id != "" && d.Sharing.Session == id
}

// pciAddresses are the GPUs of a session.
func (s *SessionRecord) pciAddresses() []string {
	var addresses []string
	for _, d := range s.Devices {
		addresses = append(addresses, d.PCIAddress)
	}
	return inOrder(addresses)
}

// startSessions makes all sessions of a claim run, and returns how many were begun.
// The partitions are live. With adopt, or where others know the session, the compute
// mode may be this driver's. The caller holds the locks of the claim and of its GPUs.
func (m *Manager) startSessions(ctx context.Context, plan *Plan, r *Record, others *neighbours, adopt bool) (begun int, err error) {
	for i := range r.Sessions {
		s := &r.Sessions[i]
		if err := plan.settle(r, s); err != nil {
			return i, err
		}
		// Also one that is being released may have left it.
		known := adopt || len(others.unclear) > 0 || heldBy(others.records, s.ID)
		err := m.startSession(ctx, r, s, others, known)
		if errors.Is(err, sharing.ErrLeft) {
			return i + 1, err
		}
		if err != nil {
			return i, err
		}
	}
	return len(r.Sessions), nil
}

// startSession starts a session or brings it to the limits that it has to have
// now.
func (m *Manager) startSession(ctx context.Context, r *Record, s *SessionRecord, others *neighbours, adopt bool) error {
	live, err := m.sharing.Start(ctx, s.wanted(append(others.holders(), r)), adopt)
	if err != nil {
		return fmt.Errorf("device %s: %w", s.Devices[0].Device, supervisorHint(err))
	}
	if !s.live() {
		// Otherwise people have to be told first.
		s.Losses = live.Losses
	}
	s.PipeDir, s.ShmDir = live.PipeDir, live.ShmDir
	return nil
}

func supervisorHint(err error) error {
	if errors.Is(err, sharing.ErrNoSupervisor) {
		return fmt.Errorf("%w: is the DaemonSet of the mps-supervisor running on this node?", err)
	}
	return err
}

// live tells whether the session was started for the claim, and not found to be
// gone since.
func (s *SessionRecord) live() bool { return s.PipeDir != "" }

// abandonSessions ends the sessions of partitions that are gone, so that others can
// have their names.
func (m *Manager) abandonSessions(ctx context.Context, r *Record, gone []*DeviceRecord) error {
	for i := range r.Sessions {
		s := &r.Sessions[i]
		if !slices.ContainsFunc(gone, func(d *DeviceRecord) bool { return d.in(s.ID) }) {
			continue
		}
		if err := m.endSession(ctx, sharing.Session{ID: s.ID}); err != nil {
			return fmt.Errorf("device %s: %w", s.Devices[0].Device, supervisorHint(err))
		}
	}
	return nil
}

// settle fills in what is known only when the partitions are live: UUIDs, and the
// limits that a configuration gives by UUID.
func (p *Plan) settle(r *Record, s *SessionRecord) error {
	uuid := func(step int) string {
		if partition := r.Devices[step].Partition; partition != nil {
			return partition.uuid()
		}
		return p.Steps[step].Device.GPU.UUID
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		for j := range r.Devices {
			if r.Devices[j].Device == d.Device && r.Devices[j].Partition != nil {
				d.UUID = r.Devices[j].Partition.uuid()
			}
		}
	}
	for _, step := range p.Steps {
		if step.session == nil || step.session.id != s.ID || step.session.config == nil {
			continue
		}
		limits, err := step.session.config.MemoryLimits(p.configured(step.session, uuid))
		if err != nil {
			return fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
		maps.DeleteFunc(limits, func(uuid string, _ int64) bool {
			return !slices.ContainsFunc(s.Devices, func(d SessionDevice) bool { return d.UUID == uuid })
		})
		s.MemoryBytes = limits
		return nil
	}
	return nil
}

// wanted is the session as it has to be for all these claims.
func (s *SessionRecord) wanted(holders []*Record) sharing.Session {
	w := sharing.Session{ID: s.ID, MultiUser: s.MultiUser, Limits: sharing.Limits{ThreadPercentage: s.Percent, MemoryBytes: maps.Clone(s.MemoryBytes)}}
	for _, d := range s.Devices {
		if d.UUID == "" {
			// The partition was not live yet. Its compute mode goes with it.
			continue
		}
		w.Devices = append(w.Devices, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.UUID})
	}
	if !s.Shared {
		return w
	}
	most := largest(holders, s.ID)
	w.Limits = sharing.Limits{ThreadPercentage: most.Percent}
	if most.MemoryBytes > 0 {
		w.Limits.MemoryBytes = map[string]int64{}
		for _, d := range w.Devices {
			w.Limits.MemoryBytes[d.UUID] = most.MemoryBytes
		}
	}
	return w
}

// largest are the limits that let all shares in a session have theirs. The server
// holds everybody to them.
func largest(holders []*Record, id string) Limits {
	var most Limits
	first := true
	for _, r := range holders {
		for i := range r.Devices {
			d := &r.Devices[i]
			if !d.in(id) {
				continue
			}
			l := d.Sharing.Limits
			if first {
				most, first = l, false
				continue
			}
			most.Percent = larger(most.Percent, l.Percent)
			most.MemoryBytes = larger(most.MemoryBytes, l.MemoryBytes)
		}
	}
	return most
}

// larger of two limits, of which zero is none.
func larger[T int | int64](a, b T) T {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}

// stopSession ends a session with its last claim. Otherwise it tightens the limits
// to what the others need; that it cannot is no reason to keep the claim.
func (m *Manager) stopSession(ctx context.Context, r *Record, s *SessionRecord, others *neighbours) error {
	if s.Shared {
		holders := others.holders()
		if heldBy(holders, s.ID) {
			m.tighten(ctx, r, s, holders)
			return nil
		}
		if err := m.checkUnclear(ctx, s, others); err != nil {
			return err
		}
	}
	return m.endSession(ctx, s.wanted([]*Record{r}))
}

// endSession finds out first whether the supervisor answers at all. To end a session
// takes its time, and one that hangs must not hold up the pods that end.
func (m *Manager) endSession(ctx context.Context, s sharing.Session) error {
	if _, err := m.sessions(ctx); err != nil {
		return err
	}
	return m.sharing.Stop(ctx, s)
}

func (m *Manager) tighten(ctx context.Context, r *Record, s *SessionRecord, holders []*Record) {
	if largest(append([]*Record{r}, holders...), s.ID) == largest(holders, s.ID) {
		return
	}
	for _, holder := range holders {
		// One that knows its partition, unless none does yet.
		if other := holder.session(s.ID); other != nil && (other.Devices[0].UUID != "" || s.Devices[0].UUID == "") {
			s = other
		}
	}
	_, err := m.sessions(ctx) // see endSession
	if err == nil {
		_, err = m.sharing.Start(ctx, s.wanted(holders), true)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The limits of an MPS session stay above what its claims have", "session", s.ID)
	}
}

// checkUnclear keeps a session with clients that may be those of a claim whose
// record cannot be read.
func (m *Manager) checkUnclear(ctx context.Context, s *SessionRecord, others *neighbours) error {
	if len(others.unclear) == 0 {
		return nil
	}
	sessions, err := m.sessions(ctx)
	if err != nil {
		return err
	}
	if clients := sessions[s.ID].Clients; len(clients) > 0 {
		return fmt.Errorf("MPS session %s has the clients %v; %w (%s)", s.ID, clients, errUnclear, others.unclear[0])
	}
	return nil
}
