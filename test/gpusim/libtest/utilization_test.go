// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// Processes that are busy have samples, and the GPU is as busy as all of them.
func TestUtilization(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	wants(t, "GetProcessUtilization of nobody", code(d.GetProcessUtilization(0)), nvml.ERROR_NOT_FOUND)
	expect.Equal(t, get(d.GetCurrentClocksEventReasons())(t, "GetCurrentClocksEventReasons"), nvml.ClocksEventReasonGpuIdle)
	r.update(func(m *machine.Machine) {
		for i, sm := range []int{30, 0, 50} {
			m.Processes = append(m.Processes, machine.Process{PID: 100 + i, InstanceID: -1, ComputeID: -1, MemoryBytes: miB, SM: sm})
		}
		m.Processes[2].Kind = machine.MPSClient
	})
	before := uint64(time.Now().Add(-time.Hour).UnixMicro())
	samples := get(d.GetProcessUtilization(before))(t, "GetProcessUtilization")
	got := map[uint32]uint32{}
	for _, s := range samples {
		got[s.Pid] = s.SmUtil
		if s.TimeStamp <= before {
			t.Errorf("sample of %d, before %d", s.TimeStamp, before)
		}
	}
	if len(got) != 2 || got[100] != 30 || got[102] != 50 {
		t.Errorf("samples %v", got)
	}
	_, ret := d.GetProcessUtilization(uint64(time.Now().Add(time.Hour).UnixMicro()))
	wants(t, "GetProcessUtilization of the future", ret, nvml.ERROR_NOT_FOUND)
	expect.Equal(t, get(d.GetUtilizationRates())(t, "GetUtilizationRates").Gpu, 80)
	r.update(func(m *machine.Machine) { m.Processes = nil })
	enable(t, d)
	wants(t, "GetUtilizationRates with MIG", code(d.GetUtilizationRates()), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "GetProcessUtilization with MIG", code(d.GetProcessUtilization(0)), nvml.ERROR_NOT_SUPPORTED)
}

// A process that may not write the state, as in a container, says how busy it is as well.
func TestUtilizationOfHolder(t *testing.T) {
	r, d := oneH100(t)
	h := must.Get(r.file().Hold(machine.Process{InstanceID: -1, ComputeID: -1, MemoryBytes: miB, SM: 40}))(t)
	busy := func(sm uint32) {
		t.Helper()
		expect.Equal(t, get(d.GetUtilizationRates())(t, "GetUtilizationRates").Gpu, sm)
	}
	busy(40)
	must.Do(t, h.Change(machine.Process{InstanceID: -1, ComputeID: -1, MemoryBytes: 3 * miB, SM: 100}))
	busy(100)
	processes, ret := d.GetComputeRunningProcesses()
	if wants(t, "GetComputeRunningProcesses", ret, nvml.SUCCESS); len(processes) != 1 || processes[0].UsedGpuMemory != 3*miB {
		t.Errorf("processes %+v", processes)
	}
}

// GPM tells how busy partitions are, from Hopper on.
func TestGPM(t *testing.T) {
	ampere := h100(1)
	ampere.Architecture = nvml.DEVICE_ARCH_AMPERE
	r := newRoot(t, machineOf(h100(0), ampere))
	lib := r.open()
	d, old := device(t, lib, 0), device(t, lib, 1)
	enable(t, d)
	createCompute(t, createAt(t, d, id3g, place(0, 4)), nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	for device, want := range map[nvml.Device]uint32{d: 1, old: 0} {
		expect.Equal(t, get(device.GpmQueryDeviceSupport())(t, "GpmQueryDeviceSupport").IsSupportedDevice, want)
	}
	var samples [2]nvml.GpmSample
	for i := range samples {
		var ret nvml.Return
		samples[i], ret = lib.GpmSampleAlloc()
		wants(t, "GpmSampleAlloc", ret, nvml.SUCCESS)
	}
	wants(t, "sample of an old GPU", old.GpmSampleGet(samples[0]), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "sample of no instance", d.GpmMigSampleGet(14, samples[0]), nvml.ERROR_NOT_FOUND)
	id := r.machine().GPUs[0].MIG.Instances[0].ID
	r.update(func(m *machine.Machine) {
		m.Processes = []machine.Process{{PID: 100, InstanceID: id, SM: 60}}
	})
	metrics := func() nvml.GpmMetric {
		t.Helper()
		request := nvml.GpmMetricsGetType{NumMetrics: 2, Sample1: samples[0], Sample2: samples[1]}
		request.Metrics[0].MetricId, request.Metrics[1].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL), uint32(nvml.GPM_METRIC_DRAM_BW_UTIL)
		wants(t, "GpmMetricsGet", lib.GpmMetricsGet(&request), nvml.SUCCESS)
		wants(t, "a metric that is not modelled", nvml.Return(request.Metrics[1].NvmlReturn), nvml.ERROR_NOT_SUPPORTED)
		return request.Metrics[0]
	}
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[0]), nvml.SUCCESS)
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[1]), nvml.SUCCESS)
	time.Sleep(100 * time.Millisecond) // what nvml.h wants between two samples
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[1]), nvml.SUCCESS)
	if m := metrics(); m.Value != 60 || m.NvmlReturn != 0 {
		t.Errorf("metric %+v", m)
	}
	for _, s := range slices.Backward(samples[:]) {
		wants(t, "GpmSampleFree", s.Free(), nvml.SUCCESS)
	}
	wants(t, "GpmSampleFree twice", samples[0].Free(), nvml.ERROR_INVALID_ARGUMENT)
}

// Meters say what the machine has, and what a board lacks is not supported.
func TestMeters(t *testing.T) {
	linked, bare := h100(0), t4(1)
	linked.NVLinks = []machine.NVLink{{RemoteType: 2}, {RemoteType: 2}}
	linked.Meters = machine.Meters{PowerMilliwatts: 312_500, NVLinkTx: 1 << 40, NVLinkRx: 2000, PCIeTx: 1500, PCIeRx: 0}
	bare.Meters = machine.Meters{PCIeTx: -1, PCIeRx: -1}
	lib := newRoot(t, machineOf(linked, bare)).open()
	d, none := device(t, lib, 0), device(t, lib, 1)
	expect.Equal(t, get(d.GetPowerUsage())(t, "GetPowerUsage"), 312_500)
	wants(t, "GetPowerUsage of a board without", code(none.GetPowerUsage()), nvml.ERROR_NOT_SUPPORTED)
	for counter, want := range map[nvml.PcieUtilCounter]uint32{nvml.PCIE_UTIL_TX_BYTES: 1500, nvml.PCIE_UTIL_RX_BYTES: 0} {
		expect.Equal(t, get(d.GetPcieThroughput(counter))(t, "GetPcieThroughput"), want)
		wants(t, "GetPcieThroughput of a board without", code(none.GetPcieThroughput(counter)), nvml.ERROR_NOT_SUPPORTED)
	}
	wants(t, "GetPcieThroughput of no counter", code(d.GetPcieThroughput(nvml.PCIE_UTIL_COUNT)), nvml.ERROR_INVALID_ARGUMENT)

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
	_, ret := field(none, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, math.MaxUint32)
	wants(t, "the traffic of a GPU without NVLink", ret, nvml.ERROR_NOT_SUPPORTED)
	enable(t, d)
	_, ret = field(d, nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, math.MaxUint32)
	wants(t, "the traffic on NVLink in MIG mode", ret, nvml.ERROR_NOT_SUPPORTED)
	wants(t, "the power in MIG mode", code(d.GetPowerUsage()), nvml.SUCCESS)
}
