// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

const mebibyte = 1 << 20

var (
	labelSyntax = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	// Older drivers name MIG devices "MIG-GPU-<uuid>/<gi>/<ci>".
	deviceSyntax = regexp.MustCompile(`^(GPU|MIG)-[-A-Za-z0-9/]+$`)
)

// Spec describes the wanted state of a session.
type Spec struct {
	// ID names the session on this node: a DNS label of at most 63 bytes. It is
	// part of paths.
	ID string `json:"id"`
	// Devices are the UUIDs of GPUs ("GPU-…"), or the one of a MIG device
	// ("MIG-…"), in the order in which clients number them from 0.
	Devices []string `json:"devices"`
	// ThreadPercentage is the most that a client may use of the multiprocessors,
	// 1 to 100. 0 sets no limit.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// Memory is the most device memory that a client may use, by the UUID of the
	// device, in bytes; MPS counts in MiB, and the rest is cut off. A device
	// without an entry has no limit. MPS cannot remove a limit from a running
	// session: set the device's whole memory instead.
	Memory map[string]int64 `json:"memory,omitempty"`
	// MultiUser lets clients of different users run at the same time.
	MultiUser bool `json:"multiUser,omitempty"`
	// OnClientKilled is what becomes of a server after a client of it was killed that may
	// have been busy. Unlike the rest it can always change. Anything but RestartServer
	// means that the server goes on until it has no clients.
	OnClientKilled OnClientKilled `json:"onClientKilled,omitempty"`
	// ClientPriority is that of clients which do not set their own. Empty means that it does
	// not matter: no client has another than normal, and MPS is not asked whether it has
	// priorities. Otherwise a session does not start without them.
	ClientPriority ClientPriority `json:"clientPriority,omitempty"`
}

// ClientPriority is a priority among the clients of a server, a hint to the driver.
type ClientPriority string

const (
	// PriorityNormal is MPS's own default.
	PriorityNormal ClientPriority = "Normal"
	// PriorityBelowNormal is for clients whose work may wait.
	PriorityBelowNormal ClientPriority = "BelowNormal"
)

// OnClientKilled is a reaction to the death of a client.
type OnClientKilled string

// RestartServer replaces the server at once, which ends all other clients.
const RestartServer OnClientKilled = "Restart"

// ValidID reports whether an ID is a DNS label.
func ValidID(id string) bool { return labelSyntax.MatchString(id) }

// Validate returns an error that wraps ErrInvalid and names everything that is wrong
// with the spec.
func (s Spec) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(format, args...))
	}
	if !ValidID(s.ID) {
		wrong("id %q: want a DNS label of at most 63 bytes", s.ID)
	}
	s.validateDevices(wrong)
	if s.ThreadPercentage < 0 || s.ThreadPercentage > 100 {
		wrong("thread percentage %d: want 1 to 100, or 0 for no limit", s.ThreadPercentage)
	}
	if p := s.ClientPriority; p != "" && p != PriorityNormal && p != PriorityBelowNormal {
		wrong("client priority %q: want %s, %s or none", p, PriorityNormal, PriorityBelowNormal)
	}
	for _, uuid := range slices.Sorted(maps.Keys(s.Memory)) {
		if !slices.Contains(s.Devices, uuid) {
			wrong("memory limit of %s, which is not one of the devices %s", uuid, strings.Join(s.Devices, ", "))
		}
		if bytes := s.Memory[uuid]; bytes < mebibyte {
			wrong("memory limit of %s is %d bytes: want at least 1 MiB", uuid, bytes)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalid, errors.Join(errs...))
	}
	return nil
}

func (s Spec) validateDevices(wrong func(format string, args ...any)) {
	if len(s.Devices) == 0 {
		wrong("devices: want at least one UUID")
	}
	for i, uuid := range s.Devices {
		if !deviceSyntax.MatchString(uuid) {
			wrong("device %q: want a UUID like GPU-… or MIG-…", uuid)
		}
		if slices.Contains(s.Devices[:i], uuid) {
			wrong("device %s is listed twice", uuid)
		}
		if strings.HasPrefix(uuid, "MIG-") && len(s.Devices) > 1 {
			wrong("device %s: a MIG device has a session of its own, got %d devices", uuid, len(s.Devices))
		}
	}
}

// MemoryMiB returns the memory limit of the device with this index in MiB, 0 if it
// has none.
func (s Spec) MemoryMiB(device int) int64 {
	return s.Memory[s.Devices[device]] / mebibyte
}

// SameLimits reports whether a session with spec s has the limits, and the priority, of the
// wanted one, of the same devices.
func (s Spec) SameLimits(wanted Spec) bool {
	if s.ThreadPercentage != wanted.ThreadPercentage || !s.ClientPriority.Serves(wanted.ClientPriority) {
		return false
	}
	for i := range s.Devices {
		if s.MemoryMiB(i) != wanted.MemoryMiB(i) {
			return false
		}
	}
	return true
}

// Serves reports whether nothing has to be done for a session that has priority p to have
// the wanted one.
func (p ClientPriority) Serves(wanted ClientPriority) bool {
	return p == wanted || wanted == "" && p == PriorityNormal
}

// ResetPriority returns the spec with an explicit priority if the one before has any: what a
// spec does not say is not changed.
func (s Spec) ResetPriority(before Spec) Spec {
	if s.ClientPriority == "" && before.ClientPriority != "" {
		s.ClientPriority = PriorityNormal
	}
	return s
}

// CheckChange returns an error that wraps ErrDiffers if a running session with spec s
// cannot become the wanted one.
func (s Spec) CheckChange(wanted Spec) error {
	if !slices.Equal(s.Devices, wanted.Devices) {
		return fmt.Errorf("session %s: devices %w: it has %s, wanted are %s", s.ID, ErrDiffers,
			strings.Join(s.Devices, ", "), strings.Join(wanted.Devices, ", "))
	}
	if s.MultiUser != wanted.MultiUser {
		return fmt.Errorf("session %s: multi-user %w: it is %t, wanted is %t", s.ID, ErrDiffers, s.MultiUser, wanted.MultiUser)
	}
	for i, uuid := range s.Devices {
		if s.MemoryMiB(i) > 0 && wanted.MemoryMiB(i) == 0 {
			return fmt.Errorf("session %s: the memory limit of %s %w to none: it is %d MiB; give the device's whole memory instead",
				s.ID, uuid, ErrDiffers, s.MemoryMiB(i))
		}
	}
	return nil
}
