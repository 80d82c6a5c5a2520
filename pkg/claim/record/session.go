// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
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
