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
	// MPSServerMemory is what an MPS server takes of a device: 74 MiB on an H100 with driver 580. NVIDIA's MIG
	// user guide shows 60 MiB on a partition.
	MPSServerMemory = 80 * mib
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
	// contextOnLarge: a client of an H100 has 514 MiB without a limit of its multiprocessors, and 28 MiB and 3.7 MiB for each
	// of them with one (driver 580).
	contextOnLarge = 528 * mib
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

// MPSClients returns how many processes can be clients of one MPS server on this GPU,
// or on a partition with the profile. It is 0 for GPUs before Volta, where MPS can
// limit neither memory nor multiprocessors, and no MPS shares are published.
//
// NVIDIA documents 48 through CUDA 13.0 and 60 from 13.1; a partition has the same
// fraction of it as of the GPU's multiprocessors.
func (g *GPU) MPSClients(cuda Version, profile *Profile) int {
	if g.ComputeCapability.Major < 7 {
		return 0
	}
	clients := 48
	if cuda.Major > 13 || cuda.Major == 13 && cuda.Minor >= 1 {
		clients = 60
	}
	whole := g.Resources.Multiprocessors
	if profile == nil || whole <= 0 {
		return clients
	}
	return max(1, clients*profile.Resources.Multiprocessors/whole)
}

// clusterMultiprocessors is how many multiprocessors a texture processing cluster has
// on GPUs from Volta on. MPS gives whole clusters.
const clusterMultiprocessors = 2

// MPSMultiprocessors returns how many of the multiprocessors of the GPU, or of a partition, a client of MPS can
// use that has a percentage of them, from 1 to 100, where 0 is no limit. It is 0 if the
// device's number is not known, which is 0, too.
//
// NVIDIA documents that the driver rounds down to what the hardware supports ("Volta MPS
// Execution Resource Provisioning"). That these are whole clusters was seen on an H100, with
// fifteen percentages. It gave 8 to a client with 1 %, as many as the CUDA driver API documents for
// the smallest part of a GPU of its compute capability (cuDevSmResourceSplitByCount), which the others are
// taken from.
func (g *GPU) MPSMultiprocessors(of, percentage int) int {
	if percentage <= 0 || percentage >= 100 {
		return of
	}
	fewest := clusterMultiprocessors
	switch major := g.ComputeCapability.Major; {
	case major >= 9:
		fewest = 8
	case major == 8:
		fewest = 4
	}
	return min(of, max(fewest, of*percentage/100/clusterMultiprocessors*clusterMultiprocessors))
}
