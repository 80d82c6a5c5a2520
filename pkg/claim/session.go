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

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
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

// startSessions makes all sessions of a claim run. The partitions are live. The
// caller holds the locks of the claim and of its GPUs.
func (m *Manager) startSessions(ctx context.Context, plan *Plan, r *Record, adopt bool) error {
	if len(r.Sessions) == 0 {
		return nil
	}
	neighbours, err := m.neighbours(r)
	if err != nil {
		return err
	}
	others, err := m.holders(r)
	if err != nil {
		return err
	}
	for i := range r.Sessions {
		s := &r.Sessions[i]
		if err := plan.settle(r, s); err != nil {
			return err
		}
		// Also one that is being released may have left the compute mode.
		if err := m.startSession(ctx, r, s, others, adopt || heldBy(neighbours, s.ID)); err != nil {
			return err
		}
	}
	return nil
}

// startSession starts a session or brings it to the limits that it has to have
// now.
func (m *Manager) startSession(ctx context.Context, r *Record, s *SessionRecord, others []*Record, adopt bool) error {
	live, err := m.sharing.Start(ctx, s.wanted(append([]*Record{r}, others...)), adopt)
	if errors.Is(err, sharing.ErrNoSupervisor) {
		err = fmt.Errorf("%w: is the DaemonSet of the mps-supervisor running on this node?", err)
	}
	if err != nil {
		return fmt.Errorf("device %s: %w", s.Devices[0].Device, err)
	}
	s.PipeDir, s.ShmDir, s.Losses = live.PipeDir, live.ShmDir, live.Losses
	return nil
}

// settle fills in what is known only when the partitions are live: UUIDs, and the
// limits that a configuration gives by UUID.
func (p *Plan) settle(r *Record, s *SessionRecord) error {
	var uuids []string
	for i := range s.Devices {
		d := &s.Devices[i]
		for j := range r.Devices {
			if r.Devices[j].Device == d.Device && r.Devices[j].Partition != nil {
				d.UUID = r.Devices[j].Partition.uuid()
			}
		}
		uuids = append(uuids, d.UUID)
	}
	for _, step := range p.Steps {
		if step.session == nil || step.session.id != s.ID || step.session.config == nil {
			continue
		}
		var err error
		if s.MemoryBytes, err = step.session.config.MemoryLimits(uuids); err != nil {
			return fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
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

// neighbours are the other claims of this boot.
func (m *Manager) neighbours(r *Record) ([]*Record, error) {
	all, _, err := m.journal.list()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(other *Record) bool {
		return other.Claim.UID == r.Claim.UID || other.BootID != r.BootID
	}), nil
}

// holders are the neighbours that may use what they have. One that is being
// released uses nothing any more.
func (m *Manager) holders(r *Record) ([]*Record, error) {
	all, err := m.neighbours(r)
	return slices.DeleteFunc(all, func(other *Record) bool { return other.State == Unpreparing }), err
}

// heldBy tells whether one of these claims has a device in the session.
func heldBy(holders []*Record, id string) bool {
	return slices.ContainsFunc(holders, func(r *Record) bool {
		return slices.ContainsFunc(r.Devices, func(d DeviceRecord) bool { return d.in(id) })
	})
}

// sharedBy tells whether one of these claims has another share of the device.
func (d *DeviceRecord) sharedBy(holders []*Record) bool {
	return d.isShare() && slices.ContainsFunc(holders, func(r *Record) bool {
		return slices.ContainsFunc(r.Devices, func(other DeviceRecord) bool { return !other.Admin && other.Device == d.Device })
	})
}

// stopSession ends a session with its last claim. Otherwise it tightens the limits
// to what the others need; that it cannot is no reason to keep the claim.
func (m *Manager) stopSession(ctx context.Context, r *Record, s *SessionRecord, others []*Record) error {
	if !s.Shared || !heldBy(others, s.ID) {
		return m.sharing.Stop(ctx, s.wanted([]*Record{r}))
	}
	if largest(append([]*Record{r}, others...), s.ID) == largest(others, s.ID) {
		return nil
	}
	if _, err := m.sharing.Start(ctx, s.wanted(others), true); err != nil {
		klog.FromContext(ctx).Error(err, "The limits of an MPS session stay above what its claims have", "session", s.ID)
	}
	return nil
}

// setIntervals sets the time slices of a claim. Where others have shares already,
// theirs stays.
func (m *Manager) setIntervals(ctx context.Context, r *Record) error {
	var others []*Record
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Sharing == nil || d.Sharing.Interval == "" {
			continue
		}
		if others == nil {
			var err error
			if others, err = m.holders(r); err != nil {
				return err
			}
		}
		if d.sharedBy(others) {
			continue
		}
		if err := m.sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, d.Sharing.Interval); err != nil {
			return fmt.Errorf("device %s: %w", d.Device, err)
		}
	}
	return nil
}

// resetInterval gives the GPU back its time slice when nobody needs another one.
func (m *Manager) resetInterval(ctx context.Context, d *DeviceRecord, others []*Record) error {
	if d.Sharing == nil || d.Sharing.Interval == "" || d.sharedBy(others) {
		return nil
	}
	return m.sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, policy.IntervalDefault)
}

// keepInterval takes over what a share found: its GPU has the time slice that the
// first share has set, and the last one resets it.
func (r *Record) keepInterval(others []*Record) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Type != device.TimeSlice || d.Partition != nil || d.Admin {
			continue
		}
		for _, other := range others {
			for j := range other.Devices {
				o := &other.Devices[j]
				if o.Admin || o.Device != d.Device {
					continue
				}
				switch {
				case d.Sharing != nil && o.Sharing == nil:
					d.Sharing.Interval = ""
				case d.Sharing != nil:
					d.Sharing.Interval = o.Sharing.Interval
				case o.Sharing != nil && o.Sharing.Interval != "":
					d.Sharing = &SharingRecord{UUID: o.Sharing.UUID, Interval: o.Sharing.Interval}
				}
			}
		}
	}
}
