// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Session is an MPS session that devices of a claim are in.
type Session struct {
	ID string `json:"id"`
	// Shared means that claims have shares of it: its limits are the largest among
	// theirs, and it ends with the last. Otherwise it is the claim's own.
	Shared bool `json:"shared,omitempty"`
	// Devices have no UUID before a partition exists.
	Devices   []SessionDevice `json:"devices"`
	MultiUser bool            `json:"multiUser,omitempty"`
	// Percent and MemoryBytes (by UUID) are the limits of the claim's own session.
	Percent     int              `json:"percent,omitempty"`
	MemoryBytes map[string]int64 `json:"memoryBytes,omitempty"`
	// ClientPriority is that of clients of the claim's own session. Empty is normal.
	ClientPriority policy.ClientPriority `json:"clientPriority,omitempty"`

	// PipeDir and ShmDir are empty until the session runs for the claim.
	PipeDir string `json:"pipeDir,omitempty"`
	ShmDir  string `json:"shmDir,omitempty"`
	// Losses is how often the clients had lost their server by then, or when that
	// was last reported.
	Losses int `json:"losses,omitempty"`
	// Kills is the same for clients that were killed while others went on.
	Kills int `json:"kills,omitempty"`
}

// SessionDevice is a GPU or a partition in a session.
type SessionDevice struct {
	Device     string `json:"device"`
	PCIAddress string `json:"pciAddress"`
	UUID       string `json:"uuid,omitempty"`
	// MemoryBytes is the limit that the claim's configuration sets on the device in
	// a session of its own, or zero.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
}

// Running reports whether the session was started for the claim, and not found to
// be gone since.
func (s *Session) Running() bool { return s.PipeDir != "" }

// Stopped notes that the session is gone.
func (s *Session) Stopped() { s.PipeDir, s.ShmDir, s.Losses, s.Kills = "", "", 0, 0 }

// PCIAddresses returns the GPUs of a session, in order.
func (s *Session) PCIAddresses() []string {
	var addresses []string
	for _, d := range s.Devices {
		addresses = append(addresses, d.PCIAddress)
	}
	return gpu.SortPCIAddresses(addresses)
}

// takeLimits fills in the limits of devices, which older versions did not write down.
func (s *Session) takeLimits(planned *Session) {
	for i := range s.Devices {
		for _, d := range planned.Devices {
			if d.Device == s.Devices[i].Device && s.Devices[i].MemoryBytes == 0 {
				s.Devices[i].MemoryBytes = d.MemoryBytes
			}
		}
	}
}

// Resolve fills in the UUIDs of partitions, which are known when they are live, and
// the limits by UUID.
func (s *Session) Resolve(r *Record) {
	for i := range s.Devices {
		d := &s.Devices[i]
		for j := range r.Devices {
			if r.Devices[j].Device == d.Device && r.Devices[j].Partition != nil {
				d.UUID = r.Devices[j].Partition.LiveUUID()
			}
		}
	}
	if s.Shared || !slices.ContainsFunc(s.Devices, func(d SessionDevice) bool { return d.MemoryBytes > 0 }) {
		return
	}
	s.MemoryBytes = map[string]int64{}
	for _, d := range s.Devices {
		if d.UUID != "" && d.MemoryBytes > 0 {
			s.MemoryBytes[d.UUID] = d.MemoryBytes
		}
	}
}

// Desired returns the session as it has to be for all claims that hold it.
func (s *Session) Desired(holders []*Record) sharing.Session {
	desired := sharing.Session{
		ID: s.ID, MultiUser: s.MultiUser,
		Limits:         sharing.Limits{ThreadPercentage: s.Percent, MemoryBytes: maps.Clone(s.MemoryBytes)},
		ClientPriority: s.ClientPriority,
	}
	for _, d := range s.Devices {
		if d.UUID == "" {
			// The partition was not live yet. Its compute mode goes with it.
			continue
		}
		desired.Devices = append(desired.Devices, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.UUID})
	}
	if !s.Shared {
		return desired
	}
	if restartsServer(holders, s.ID) {
		desired.OnClientKilled = policy.KilledRestart
	}
	desired.ClientPriority = highestPriority(holders, s.ID)
	largest := LargestLimits(holders, s.ID)
	desired.Limits = sharing.Limits{ThreadPercentage: largest.Percent}
	if largest.MemoryBytes > 0 {
		desired.Limits.MemoryBytes = map[string]int64{}
		for _, d := range desired.Devices {
			desired.Limits.MemoryBytes[d.UUID] = largest.MemoryBytes
		}
	}
	return desired
}

// restartsServer reports whether any share in a session was prepared when the policy asked
// for a restart after a client was killed.
func restartsServer(holders []*Record, session string) bool {
	return slices.ContainsFunc(holders, func(r *Record) bool {
		return slices.ContainsFunc(r.Devices, func(d Device) bool {
			return d.In(session) && d.Sharing.OnClientKilled == policy.KilledRestart
		})
	})
}

// highestPriority returns the highest among the shares in a session, or nothing if all are
// normal, which needs no MPS that has priorities. Those with a lower one have it in their
// environment as well.
func highestPriority(holders []*Record, session string) policy.ClientPriority {
	below, all := false, true
	for _, r := range holders {
		for i := range r.Devices {
			if d := &r.Devices[i]; d.In(session) {
				isBelow := d.Sharing.ClientPriority == policy.PriorityBelowNormal
				below, all = below || isBelow, all && isBelow
			}
		}
	}
	switch {
	case !below:
		return ""
	case all:
		return policy.PriorityBelowNormal
	}
	return policy.PriorityNormal
}

// LargestLimits returns the limits that let all shares in a session have theirs. The
// server holds everybody to them.
func LargestLimits(holders []*Record, session string) Limits {
	var largest Limits
	first := true
	for _, r := range holders {
		for i := range r.Devices {
			d := &r.Devices[i]
			if !d.In(session) {
				continue
			}
			if first {
				largest, first = d.Sharing.Limits, false
				continue
			}
			largest.Percent = larger(largest.Percent, d.Sharing.Limits.Percent)
			largest.MemoryBytes = larger(largest.MemoryBytes, d.Sharing.Limits.MemoryBytes)
		}
	}
	return largest
}

// larger returns the larger of two limits, of which zero is none.
func larger[T int | int64](a, b T) T {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}
