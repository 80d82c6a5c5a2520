// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

const mib = 1 << 20

// What programs cannot have of a device's memory, where the driver does not say how much
// that is. Estimates are rather too large: too small ones make programs fail that stay
// below their limits.
const (
	// unknownReserved is more than any driver is known to keep of an undivided GPU.
	unknownReserved = 1024 * mib
	// instanceReserved is for each compute slice of a partition. NVIDIA's MIG user guide
	// shows empty partitions of an A100 with 107 MiB (3g.20gb) in use; those of an H100
	// have 15 MiB for each slice.
	instanceReserved = 36 * mib
	// instanceReservedWithGraphics is that of chips whose partitions can have graphics: an
	// empty 1g.24gb of an RTX PRO 6000 (compute capability 12.0) shows 64 MiB.
	instanceReservedWithGraphics = 64 * mib
	// mpsServer is what an MPS server has: NVIDIA's MIG user guide shows 60 MiB on
	// a partition, published output of nvidia-smi 25 to 30 on whole GPUs.
	mpsServer = 64 * mib
)

// A context has about as much as the multiprocessors can have threads, so that it
// depends on the board.
const (
	// contextOnPartition: the MIG user guide shows clients with 326 MiB.
	contextOnPartition = 384 * mib
	// contextOnTuring: published output shows small programs with 107 MiB on a T4.
	contextOnTuring = 160 * mib
	// contextOnSmall is for chips of which nothing is published: those with fewer threads
	// (compute capability 8.6 and 8.9, as of A10 and L4), and Volta.
	contextOnSmall = 384 * mib
	// contextOnLarge: published output shows a client with 456 MiB.
	contextOnLarge = 512 * mib
)

// ReservedMemory returns how many bytes the driver keeps of an undivided GPU (nil), or
// of a partition with the profile. It is an estimate unless the driver has reported it.
func (g *GPU) ReservedMemory(profile *Profile) uint64 {
	switch {
	case profile != nil && g.ComputeCapability.Major >= 12:
		return uint64(max(1, profile.Slices)) * instanceReservedWithGraphics
	case profile != nil:
		return uint64(max(1, profile.Slices)) * instanceReserved
	case g.ReservedBytes > 0:
		return g.ReservedBytes
	}
	return unknownReserved
}

// MPSServerMemory estimates how many bytes an MPS server takes of a device.
func (g *GPU) MPSServerMemory() uint64 { return mpsServer }

// ContextMemory estimates how many bytes of an undivided GPU (nil), or of a partition, a
// program's CUDA context takes beside what the program allocates. MPS counts only a part of
// them, if any, against the program's limit.
func (g *GPU) ContextMemory(profile *Profile) uint64 {
	cc := g.ComputeCapability
	switch {
	case profile != nil:
		return contextOnPartition
	case cc.Major == 7 && cc.Minor >= 5:
		return contextOnTuring
	case cc.Major < 8 || cc.Major == 8 && cc.Minor > 0:
		return contextOnSmall
	}
	return contextOnLarge
}
