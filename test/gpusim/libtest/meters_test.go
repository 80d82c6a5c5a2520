// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Meters say what the machine has, and what a board lacks is not supported.
func TestMeters(t *testing.T) {
	linked, bare := h100(0), t4(1)
	linked.NVLinks = []machine.NVLink{{RemoteType: 2}, {RemoteType: 2}}
	linked.Meters = machine.Meters{PowerMilliwatts: 312_500, NVLinkTx: 1 << 40, NVLinkRx: 2000, PCIeTx: 1500, PCIeRx: 0}
	bare.Meters = machine.Meters{PCIeTx: -1, PCIeRx: -1}
	lib := newRoot(t, machineOf(linked, bare)).open()
	d, none := device(t, lib, 0), device(t, lib, 1)
	power, ret := d.GetPowerUsage()
	if wants(t, "GetPowerUsage", ret, nvml.SUCCESS); power != 312_500 {
		t.Errorf("%d mW", power)
	}
	_, ret = none.GetPowerUsage()
	wants(t, "GetPowerUsage of a board without", ret, nvml.ERROR_NOT_SUPPORTED)
	for counter, want := range map[nvml.PcieUtilCounter]uint32{nvml.PCIE_UTIL_TX_BYTES: 1500, nvml.PCIE_UTIL_RX_BYTES: 0} {
		kb, ret := d.GetPcieThroughput(counter)
		if wants(t, "GetPcieThroughput", ret, nvml.SUCCESS); kb != want {
			t.Errorf("counter %d: %d KB/s", counter, kb)
		}
		_, ret = none.GetPcieThroughput(counter)
		wants(t, "GetPcieThroughput of a board without", ret, nvml.ERROR_NOT_SUPPORTED)
	}
	_, ret = d.GetPcieThroughput(nvml.PCIE_UTIL_COUNT)
	wants(t, "GetPcieThroughput of no counter", ret, nvml.ERROR_INVALID_ARGUMENT)

	field := func(d nvml.Device, id, scope uint32) (uint64, nvml.Return) {
		fields := []nvml.FieldValue{{FieldId: id, ScopeId: scope}}
		wants(t, "GetFieldValues", d.GetFieldValues(fields), nvml.SUCCESS)
		return binary.LittleEndian.Uint64(fields[0].Value[:]), nvml.Return(fields[0].NvmlReturn)
	}
	for _, test := range []struct {
		id, scope uint32
		want      uint64
		ret       nvml.Return
	}{
		{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, math.MaxUint32, 1 << 40, nvml.SUCCESS},
		{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, math.MaxUint32, 2000, nvml.SUCCESS},
		{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 1, 1000, nvml.SUCCESS},
		{nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 2, 0, nvml.ERROR_INVALID_ARGUMENT},
		{nvml.FI_DEV_NVLINK_THROUGHPUT_RAW_RX, math.MaxUint32, 0, nvml.ERROR_NOT_SUPPORTED},
	} {
		if got, ret := field(d, test.id, test.scope); ret != test.ret || got != test.want {
			t.Errorf("field %d of %d: %d, %v", test.id, test.scope, got, ret)
		}
	}
	_, ret = field(none, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, math.MaxUint32)
	wants(t, "the traffic of a GPU without NVLink", ret, nvml.ERROR_NOT_SUPPORTED)
	enable(t, d)
	_, ret = field(d, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, math.MaxUint32)
	wants(t, "the traffic on NVLink in MIG mode", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = d.GetPowerUsage()
	wants(t, "the power in MIG mode", ret, nvml.SUCCESS)
}
