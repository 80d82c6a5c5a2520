// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"fmt"
	"math"
)

// Profile is one of MIG.
type Profile struct {
	// Name is "1g.10gb".
	Name string
	// Most is how many partitions with it one GPU has room for.
	Most      int
	MemoryMiB int64
}

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

// SmallestProfile returns the one with the least memory of those with enough. Of profiles with
// the same memory it takes the one with the fewest compute slices, but not one with much memory
// and few compute slices, such as 1g.20gb: those are for work that only needs room.
func SmallestProfile(profiles []Profile, memory int64) (Profile, bool) {
	var most Profile
	for _, p := range profiles {
		if p.MemoryMiB > most.MemoryMiB {
			most = p
		}
	}
	var best Profile
	for _, p := range profiles {
		if p.MemoryMiB<<20 < memory || !balanced(p, most) {
			continue
		}
		if best.Name == "" || p.MemoryMiB < best.MemoryMiB || p.MemoryMiB == best.MemoryMiB && p.Slices() < best.Slices() {
			best = p
		}
	}
	return best, best.Name != ""
}

// balanced reports whether a profile has nearly the same part of the compute slices as of the
// memory.
func balanced(p, most Profile) bool {
	const nearly = 0.75
	if most.Slices() == 0 || most.MemoryMiB == 0 {
		return true
	}
	compute := float64(p.Slices()) / float64(most.Slices())
	return compute >= nearly*float64(p.MemoryMiB)/float64(most.MemoryMiB)
}

// Slices returns how many compute slices a profile has: N of "Ng.10gb", 0 if it has another form.
func (p Profile) Slices() int {
	n := 0
	// What has another form has none.
	if _, err := fmt.Sscanf(p.Name, "%dg.", &n); err != nil {
		return 0
	}
	return n
}
