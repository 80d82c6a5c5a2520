// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"encoding/binary"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	thousand = 1000
	kibi     = 1024
	// allLinks is the scope of a field that adds up the links.
	allLinks = math.MaxUint32
)

// readMeters reads what the board draws and what it moves. A value that cannot be read is left out.
func readMeters(r *reading, usage *gpu.Usage) {
	usage.PowerWatts = known(r, "nvmlDeviceGetPowerUsage", func() (float64, nvml.Return) {
		milliwatts, ret := r.dev.GetPowerUsage()
		return float64(milliwatts) / thousand, ret
	})
	r.pardon()
	usage.NVLink = known(r, "nvmlDeviceGetFieldValues", func() (gpu.Traffic, nvml.Return) {
		fields := []nvml.FieldValue{
			{FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ScopeId: allLinks}, {FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ScopeId: allLinks},
		}
		ret := r.dev.GetFieldValues(fields)
		kib := func(i int) uint64 {
			if ret == nvml.SUCCESS {
				ret = nvml.Return(fields[i].NvmlReturn)
			}
			return binary.LittleEndian.Uint64(fields[i].Value[:])
		}
		return gpu.Traffic{Sent: kibi * kib(0), Received: kibi * kib(1)}, ret
	})
	r.pardon()
	// Each of the two counts for 20 ms. The work of a claim does not wait for that, but the next sample
	// does without.
	if r.queue.Idle() {
		usage.PCIe = readPCIe(r)
		r.pardon()
	}
}

// readPCIe returns both directions or nothing.
func readPCIe(r *reading) *gpu.Traffic {
	read := func(counter nvml.PcieUtilCounter) uint64 {
		return thousand * uint64(must(r, "nvmlDeviceGetPcieThroughput", func() (uint32, nvml.Return) { return r.dev.GetPcieThroughput(counter) }))
	}
	traffic := gpu.Traffic{Sent: read(nvml.PCIE_UTIL_TX_BYTES), Received: read(nvml.PCIE_UTIL_RX_BYTES)}
	if r.err != nil {
		return nil
	}
	return &traffic
}
