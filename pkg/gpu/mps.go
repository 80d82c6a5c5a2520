// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

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
	if profile == nil {
		return clients
	}
	whole := g.Resources.Multiprocessors
	if whole <= 0 {
		return clients
	}
	return max(1, clients*profile.Resources.Multiprocessors/whole)
}

// clusterMultiprocessors is how many multiprocessors a texture processing cluster has
// on GPUs from Volta on. MPS gives whole clusters.
const clusterMultiprocessors = 2

// MPSMultiprocessors returns how many of a device's multiprocessors a client of MPS can
// use that has a percentage of them, from 1 to 100, where 0 is no limit. It is 0 if the
// device's number is not known, which is 0, too.
//
// NVIDIA documents that the driver rounds down to what the hardware supports ("Volta MPS
// Execution Resource Provisioning"). That these are whole clusters, and one at least, is
// inferred: 25 % of 188 multiprocessors were 46.
func MPSMultiprocessors(of, percentage int) int {
	if percentage <= 0 || percentage >= 100 {
		return of
	}
	return min(of, max(clusterMultiprocessors, of*percentage/100/clusterMultiprocessors*clusterMultiprocessors))
}
