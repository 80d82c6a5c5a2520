// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import "math"

// HoursPerMonth is what cloud providers count.
const HoursPerMonth = 730

// HoursPerDay is for GPU-hours.
const HoursPerDay = 24

// MonthlyCost is what GPUs cost that are paid by the hour (E1).
func MonthlyCost(gpus, pricePerHour float64) float64 { return gpus * pricePerHour * HoursPerMonth }

// Saving is the part of the GPUs that sharing makes unnecessary (E2), from 0 to 1. It is 0
// where nothing is used.
func Saving(needed, unshared float64) float64 {
	if unshared <= 0 {
		return 0
	}
	return 1 - needed/unshared
}

// CostPerWorkload is what one of so many equal tenants of a GPU pays for an hour (E3).
// Overhead is the part by which sharing slows the work, such as 0.08: the same work then
// needs the GPU for longer. Without a tenant it is 0.
func CostPerWorkload(pricePerHour, overhead float64, tenants int) float64 {
	if tenants <= 0 {
		return 0
	}
	return pricePerHour * (1 + overhead) / float64(tenants)
}

// RecoveredPerDay is how many GPU-hours of a day other tenants use on GPUs that would
// otherwise have one each (E4).
func RecoveredPerDay(gpus float64, tenants int) float64 {
	if tenants <= 0 {
		return 0
	}
	return gpus * HoursPerDay * (1 - 1/float64(tenants))
}

// SharedCapacity is how many workloads GPUs, or partitions, have room for (E5).
func SharedCapacity(devices, clientsEach int) int { return devices * clientsEach }

// RoundHalfUp rounds to so many decimal places: 2372.5 to 2373. Prices are decimal
// fractions, which are not exact: what is a hair below one half counts as half.
func RoundHalfUp(x float64, places int) float64 {
	const hair = 1e-9
	unit := math.Pow10(places)
	return math.Floor(x*unit+0.5+hair) / unit
}

// Range is from Low to High, both included.
type Range struct {
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Overhead is by how much each mechanism slows the work, as a part of it (E6). It depends on
// the workload: these are published averages. A software limit costs something with each
// call, for which no figure is published; it runs on time slices.
func Overhead(m Mechanism) Range {
	switch m {
	case MPS, PartitionMPS:
		return Range{0.05, 0.05}
	case TimeSlice, PartitionTimeSlice, SoftwareLimits:
		return Range{0.10, 0.15}
	case Whole, Partition:
	}
	return Range{}
}
