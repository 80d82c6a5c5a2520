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

// Validate finds what is wrong with a spec. The errors wrap ErrInvalid.
func (s Spec) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf(format, args...))
	}
	if !labelSyntax.MatchString(s.ID) {
		wrong("id %q: want a DNS label of at most 63 bytes", s.ID)
	}
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
	if s.ThreadPercentage < 0 || s.ThreadPercentage > 100 {
		wrong("thread percentage %d: want 1 to 100, or 0 for no limit", s.ThreadPercentage)
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

// clone has nothing in common with the original.
func (s Spec) clone() Spec {
	s.Devices = slices.Clone(s.Devices)
	s.Memory = maps.Clone(s.Memory)
	return s
}

// memoryLimit is the limit of a device in MiB, 0 without one.
func (s Spec) memoryLimit(device int) int64 {
	return s.Memory[s.Devices[device]] / mebibyte
}

// sameLimits tells whether MPS is to be told the same numbers.
func (s Spec) sameLimits(other Spec) bool {
	if s.ThreadPercentage != other.ThreadPercentage {
		return false
	}
	for i := range s.Devices {
		if s.memoryLimit(i) != other.memoryLimit(i) {
			return false
		}
	}
	return true
}

// changeableTo says why a session that runs cannot become another one.
func (s Spec) changeableTo(wanted Spec) error {
	if !slices.Equal(s.Devices, wanted.Devices) {
		return fmt.Errorf("session %s: devices %w: it has %s, wanted are %s", s.ID, ErrDiffers,
			strings.Join(s.Devices, ", "), strings.Join(wanted.Devices, ", "))
	}
	if s.MultiUser != wanted.MultiUser {
		return fmt.Errorf("session %s: multi-user %w: it is %t, wanted is %t", s.ID, ErrDiffers, s.MultiUser, wanted.MultiUser)
	}
	for i, uuid := range s.Devices {
		if s.memoryLimit(i) > 0 && wanted.memoryLimit(i) == 0 {
			return fmt.Errorf("session %s: the memory limit of %s %w to none: it is %d MiB; give the device's whole memory instead",
				s.ID, uuid, ErrDiffers, s.memoryLimit(i))
		}
	}
	return nil
}
