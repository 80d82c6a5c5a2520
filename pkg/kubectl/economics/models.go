// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import "math"

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
