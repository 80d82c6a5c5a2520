// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// BenchmarkCreateDestroy is one partition made and removed again, without a
// model of the time that hardware takes.
func BenchmarkCreateDestroy(b *testing.B) {
	d := benchmarkDevice(b)
	for b.Loop() {
		must.Do(b, fill(d, nvml.GPU_INSTANCE_PROFILE_1_SLICE))
		must.Do(b, clear(d))
	}
}

// BenchmarkRead is a call that changes nothing.
func BenchmarkRead(b *testing.B) {
	d := benchmarkDevice(b)
	for b.Loop() {
		if _, ret := d.GetUUID(); ret != nvml.SUCCESS {
			b.Fatal(ret)
		}
	}
}

// BenchmarkReadBesideRules is the same call on a machine with as many faults
// and latencies as it can have, none of which is about it.
func BenchmarkReadBesideRules(b *testing.B) {
	r := newRoot(b, machineOf(h100(0)))
	d := device(b, r.open(), 0)
	r.update(func(m *machine.Machine) {
		for range 32 {
			state.AddFault(m, machine.Fault{Function: "nvmlDeviceGetUnitHandle"})
		}
		for i := range 48 {
			m.Latencies = append(m.Latencies, machine.Latency{Function: fmt.Sprint("nvmlDeviceGet", i)})
		}
	})
	for b.Loop() {
		if _, ret := d.GetUUID(); ret != nvml.SUCCESS {
			b.Fatal(ret)
		}
	}
}

func benchmarkDevice(b *testing.B) nvml.Device {
	b.Helper()
	d := device(b, newRoot(b, machineOf(h100(0), h100(1), h100(2), h100(3), h100(4), h100(5), h100(6), h100(7))).open(), 0)
	enable(b, d)
	return d
}
