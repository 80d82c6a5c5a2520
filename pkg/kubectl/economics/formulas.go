// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import "math"

const (
	// HoursPerMonth is what cloud providers count (E1).
	HoursPerMonth = 730
	hoursPerDay   = 24
)

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
// needs the GPU for longer.
func CostPerWorkload(pricePerHour, overhead float64, tenants int) float64 {
	return pricePerHour * (1 + overhead) / float64(tenants)
}

// RecoveredPerDay is how many GPU-hours of a day other tenants use on a GPU that would
// otherwise have one (E4).
func RecoveredPerDay(tenants int) float64 {
	if tenants == 0 {
		return 0
	}
	return hoursPerDay * (1 - 1/float64(tenants))
}

// RoundHalfUp rounds to so many decimal places: 2372.5 to 2373. Prices are decimal
// fractions, which are not exact: what is a hair below one half counts as half.
func RoundHalfUp(x float64, places int) float64 {
	const hair = 1e-9
	unit := math.Pow10(places)
	return math.Floor(x*unit+0.5+hair) / unit
}
