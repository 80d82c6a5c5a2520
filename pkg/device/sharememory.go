// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// mpsMemory divides the memory of a device whose clients share it through MPS, in MiB.
// What is not offered is rounded up.
type mpsMemory struct {
	// usable is what the driver leaves.
	usable int64
	// server is for the MPS server, reserved by the policy.
	server, reserved int64
	// context is for the contexts of each client.
	context int64
}

func (c *catalog) mpsMemory(profile *gpu.Profile, offer policy.MPSOffer) mpsMemory {
	m := mpsMemory{
		usable:   c.usableMemory(profile),
		server:   mebibytes(gpu.MPSServerMemory),
		context:  mebibytes(c.gpu.ContextMemory(profile)),
		reserved: mebibytes(uint64(max(0, offer.ReservedMemoryBytes))),
	}
	if offer.ServerMemoryBytes != nil {
		m.server = mebibytes(uint64(max(0, *offer.ServerMemoryBytes)))
	}
	if offer.ContextMemoryBytes != nil {
		m.context = mebibytes(uint64(max(0, *offer.ContextMemoryBytes)))
	}
	return m
}

// usableMemory returns the MiB of an undivided GPU (nil), or of a partition with the
// profile, that the driver does not keep for itself.
func (c *catalog) usableMemory(profile *gpu.Profile) int64 {
	total := c.gpu.Resources.MemoryBytes
	if profile != nil {
		total = profile.Resources.MemoryBytes
	}
	reserved := c.gpu.ReservedMemory(profile)
	return int64((total - min(total, reserved)) / mib) // #nosec G115 -- at most 2^44
}

// mebibytes rounds up.
func mebibytes(bytes uint64) int64 {
	n := bytes / mib
	if bytes%mib > 0 {
		n++
	}
	return int64(n) // #nosec G115 -- at most 2^44
}

// clients returns for how many clients there is memory: each needs 1 MiB beside its
// context.
func (m mpsMemory) clients() int {
	return int(max(0, m.usable-m.server-m.reserved) / (m.context + 1))
}

// offered returns what so many clients can have together. It is at least 1 MiB for each
// of clients().
func (m mpsMemory) offered(clients int) int64 {
	return m.usable - m.server - m.reserved - int64(clients)*m.context
}

func (m mpsMemory) String() string {
	return fmt.Sprintf("of %d MiB, %d are for the MPS server, %d are reserved, and each client's context has %d", m.usable, m.server, m.reserved, m.context)
}
