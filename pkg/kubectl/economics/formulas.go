// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"math"
)

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

// Weights and what comes with them: activations, caches, and CUDA's own.
const (
	bytesPerParameter = 2
	bytesQuantized    = 1
	besideWeights     = 0.2
)

// bytesTrained is what training takes for each parameter with the optimizer Adam and mixed precision: weights and gradients of 16 bits, and 32
// bits each for the master copy of the weights and two moments (https://arxiv.org/abs/1910.02054, section 3.1).
const bytesTrained = 2 + 2 + 3*4

// TrainingMemory estimates how many bytes training a model with so many billion parameters takes, and a fifth of that for activations, which
// depend on batches and lengths.
func TrainingMemory(billions float64) int64 {
	return int64(math.Ceil(billions * 1e9 * bytesTrained * (1 + besideWeights)))
}

// ModelMemory estimates how many bytes of memory a model with so many billion parameters
// needs for inference: two bytes for each parameter, one if it is quantized (to eight bits),
// and a fifth of that for caches. Long contexts and large batches need more.
func ModelMemory(billions float64, quantized bool) int64 {
	perParameter := float64(bytesPerParameter)
	if quantized {
		perParameter = bytesQuantized
	}
	return int64(math.Ceil(billions * 1e9 * perParameter * (1 + besideWeights)))
}

// smallModel is the size, in billions of parameters, below which a model uses a small part
// of a GPU.
const smallModel = 3

// Small reports whether a workload with so much memory is as small as a model below three
// billion parameters. 0 is not known.
func Small(memory int64) bool { return memory > 0 && memory < ModelMemory(smallModel, false) }
