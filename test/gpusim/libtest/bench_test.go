// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// BenchmarkCreateDestroy is one partition made and removed again, without a
// model of the time that hardware takes.
func BenchmarkCreateDestroy(b *testing.B) {
	d := benchmarkDevice(b)
	for b.Loop() {
		if err := fill(d, nvml.GPU_INSTANCE_PROFILE_1_SLICE); err != nil {
			b.Fatal(err)
		}
		if err := clear(d); err != nil {
			b.Fatal(err)
		}
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

func benchmarkDevice(b *testing.B) nvml.Device {
	b.Helper()
	d := device(b, newRoot(b, machineOf(h100(0), h100(1), h100(2), h100(3), h100(4), h100(5), h100(6), h100(7))).open(), 0)
	enable(b, d)
	return d
}
