// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"fmt"
	"math"
)

// Weights and what comes with them: activations, caches, and CUDA's own.
const (
	bytesPerParameter = 2
	bytesQuantized    = 1
	besideWeights     = 0.2
)

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

// smallest returns the partition with the least memory of those with enough, or nil. Of profiles with
// the same memory it takes the one with the fewest compute slices, but not one with much memory
// and few compute slices, such as 1g.20gb: those are for work that only needs room.
func smallest(partitions []part, memory int64) (best *part) {
	var most part
	for _, p := range partitions {
		if most.Device == nil || p.memory() > most.memory() {
			most = p
		}
	}
	for _, p := range partitions {
		less := best == nil || p.memory() < best.memory() || p.memory() == best.memory() && p.slices() < best.slices()
		if p.memory() >= memory && balanced(p, most) && less {
			best = &p
		}
	}
	return best
}

// balanced reports whether a partition has nearly the same part of the compute slices as of the
// memory.
func balanced(p, most part) bool {
	const nearly = 0.75
	if most.slices() == 0 || most.memory() == 0 {
		return true
	}
	compute := float64(p.slices()) / float64(most.slices())
	return compute >= nearly*float64(p.memory())/float64(most.memory())
}

// slices returns how many compute slices a profile has: N of "Ng.10gb", 0 if it has another form.
func (p part) slices() int {
	n := 0
	// What has another form has none.
	if _, err := fmt.Sscanf(p.Profile, "%dg.", &n); err != nil {
		return 0
	}
	return n
}
