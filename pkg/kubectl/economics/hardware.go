// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"math"
	"slices"
	"strings"
)

// GPU is a model of GPU.
type GPU struct {
	// Alias is the short name: "h100".
	Alias string
	// ProductName and Architecture are what the driver calls it.
	ProductName, Architecture string
	// Major and Minor are the compute capability.
	Major, Minor int
	MemoryMiB    int64
	// DriverMiB is what the driver keeps of it, 0 if that depends.
	DriverMiB int64
	// Profiles are those of MIG, without variants. GPUs without MIG have none.
	Profiles []Profile
}

// Profile is one of MIG.
type Profile struct {
	// Name is "1g.10gb".
	Name string
	// Most is how many partitions with it one GPU has room for.
	Most      int
	MemoryMiB int64
}

// GPUs are the models that are known without asking a cluster.
var GPUs = []GPU{
	{"p100", "Tesla P100-PCIE-16GB", "Pascal", 6, 0, 16384, 0, nil},
	{"v100", "Tesla V100-SXM2-16GB", "Volta", 7, 0, 16384, 0, nil},
	{"t4", "Tesla T4", "Turing", 7, 5, 15360, 450, nil},
	{"a10", "NVIDIA A10", "Ampere", 8, 6, 23028, 500, nil},
	{"l4", "NVIDIA L4", "Ada Lovelace", 8, 9, 23034, 500, nil},
	{"a30", "NVIDIA A30", "Ampere", 8, 0, 24576, 420, []Profile{{"1g.6gb", 4, 5952}, {"2g.12gb", 2, 11968}, {"4g.24gb", 1, 24000}}},
	{"a100-40", "NVIDIA A100-SXM4-40GB", "Ampere", 8, 0, 40960, 550, []Profile{
		{"1g.5gb", 7, 4864}, {"1g.10gb", 4, 9984}, {"2g.10gb", 3, 9984}, {"3g.20gb", 2, 20096}, {"4g.20gb", 1, 20096}, {"7g.40gb", 1, 40448},
	}},
	{"a100", "NVIDIA A100-SXM4-80GB", "Ampere", 8, 0, 81920, 770, []Profile{
		{"1g.10gb", 7, 9728}, {"1g.20gb", 4, 19968}, {"2g.20gb", 3, 19968}, {"3g.40gb", 2, 40192}, {"4g.40gb", 1, 40192}, {"7g.80gb", 1, 80640},
	}},
	{"h100", "NVIDIA H100 80GB HBM3", "Hopper", 9, 0, 81559, 480, []Profile{
		{"1g.10gb", 7, 9984}, {"1g.20gb", 4, 20096}, {"2g.20gb", 3, 20096}, {"3g.40gb", 2, 40448}, {"4g.40gb", 1, 40448}, {"7g.80gb", 1, 81152},
	}},
	{"h200", "NVIDIA H200", "Hopper", 9, 0, 143771, 650, []Profile{
		{"1g.18gb", 7, 16384}, {"1g.35gb", 4, 33024}, {"2g.35gb", 3, 33024}, {"3g.71gb", 2, 71168}, {"4g.71gb", 1, 71168}, {"7g.141gb", 1, 143104},
	}},
	{"b200", "NVIDIA B200", "Blackwell", 10, 0, 183359, 700, []Profile{
		{"1g.23gb", 7, 20992}, {"1g.45gb", 4, 45312}, {"2g.45gb", 3, 45312}, {"3g.90gb", 2, 91136}, {"4g.90gb", 1, 91136}, {"7g.180gb", 1, 182784},
	}},
	{"rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "Blackwell", 12, 0, 97887, 640, []Profile{
		{"1g.24gb", 4, 24192}, {"2g.48gb", 2, 48512}, {"4g.96gb", 1, 97408},
	}},
}

// Find returns the model with a short name, whatever the letter case.
func Find(alias string) (GPU, bool) {
	n := slices.IndexFunc(GPUs, func(g GPU) bool { return strings.EqualFold(g.Alias, alias) })
	if n < 0 {
		return GPU{}, false
	}
	return GPUs[n], true
}

// Aliases returns the short names of all models.
func Aliases() []string {
	var names []string
	for _, g := range GPUs {
		names = append(names, g.Alias)
	}
	return names
}

// MIG reports whether the GPU can be partitioned.
func (g GPU) MIG() bool { return len(g.Profiles) > 0 }

// The first compute capability and the first CUDA version with more clients of MPS.
const (
	volta         = 7
	moreClientsAt = 13*10 + 1
)

// PreVolta reports whether the GPU is of a generation whose MPS limits nothing.
func (g GPU) PreVolta() bool { return g.Major < volta }

// MPSClients returns how many processes can be clients of an MPS server on the GPU. Partage
// publishes no MPS shares before Volta, where MPS has no limits.
func (g GPU) MPSClients(cudaMajor, cudaMinor int) int {
	switch {
	case g.PreVolta():
		return 16
	case cudaMajor*10+cudaMinor >= moreClientsAt:
		return 60
	}
	return 48
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
	digits, _, found := strings.Cut(p.Name, "g.")
	if !found {
		return 0
	}
	n := 0
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0
		}
		n = n*10 + int(c-'0')
	}
	return n
}
