// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func TestInit(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	t.Setenv("GPUSIM_STATE", r.state())
	lib := nvml.New(nvml.WithLibraryPath(library))

	wants(t, "Init", lib.Init(), nvml.SUCCESS)
	wants(t, "second Init", lib.Init(), nvml.SUCCESS)
	wants(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
	wants(t, "DeviceGetCount after the first Shutdown", code(lib.DeviceGetCount()), nvml.SUCCESS)
	wants(t, "second Shutdown", lib.Shutdown(), nvml.SUCCESS)
	wants(t, "DeviceGetCount after the second Shutdown", code(lib.DeviceGetCount()), nvml.ERROR_UNINITIALIZED)
	wants(t, "InitWithFlags", lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS), nvml.SUCCESS)
	expect.Equal(t, nvml.ERROR_IN_USE.Error(), "In use by another client", "text of IN_USE")
	wants(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
}

func TestInitWithoutDriver(t *testing.T) {
	remove := func(path string) func(*root) error {
		return func(r *root) error { return os.RemoveAll(filepath.Join(r.dir, path)) }
	}
	for name, c := range map[string]struct {
		spoil func(r *root) error
		want  nvml.Return
	}{
		"no nodes":           {remove("dev"), nvml.ERROR_DRIVER_NOT_LOADED},
		"no control node":    {remove("dev/nvidiactl"), nvml.ERROR_DRIVER_NOT_LOADED},
		"no state":           {remove("var/lib/gpusim/state"), nvml.ERROR_DRIVER_NOT_LOADED},
		"foreign state":      {func(r *root) error { return os.WriteFile(r.state(), []byte("something else"), 0o644) }, nvml.ERROR_DRIVER_NOT_LOADED},
		"state of a version": {func(r *root) error { return poke(r.state(), 8, 99) }, nvml.ERROR_LIB_RM_VERSION_MISMATCH},
		"no GPU node":        {remove("dev/nvidia0"), nvml.SUCCESS},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, machineOf(h100(0)))
			must.Do(t, c.spoil(r))
			t.Setenv("GPUSIM_STATE", r.state())
			lib := nvml.New(nvml.WithLibraryPath(library))
			wants(t, "Init", lib.Init(), c.want)
			if c.want == nvml.SUCCESS {
				expect.Equal(t, get(lib.DeviceGetCount())(t, "DeviceGetCount"), 0, "GPUs without a node")
				wants(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
			}
		})
	}
}

// poke changes one byte of a file.
func poke(path string, offset int64, b byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte{b}, offset)
	return err
}

func TestSystem(t *testing.T) {
	lib := newRoot(t, machineOf(h100(0))).open()
	driver := get(lib.SystemGetDriverVersion())(t, "SystemGetDriverVersion")
	version := get(lib.SystemGetNVMLVersion())(t, "SystemGetNVMLVersion")
	cuda := get(lib.SystemGetCudaDriverVersion_v2())(t, "SystemGetCudaDriverVersion")
	expect.Equal(t, fmt.Sprint(driver, " ", version, " ", cuda), "580.95.05 13.580.95.05 13000", "versions")
}

// facts is what a device says of itself.
func facts(t *testing.T, d nvml.Device) map[string]any {
	t.Helper()
	out := map[string]any{}
	put := func(name string, value any, ret nvml.Return) {
		if ret != nvml.SUCCESS {
			value = ret.Error()
		}
		out[name] = value
	}
	index, ret := d.GetIndex()
	put("index", index, ret)
	uuid, ret := d.GetUUID()
	put("uuid", uuid, ret)
	name, ret := d.GetName()
	put("name", name, ret)
	serial, ret := d.GetSerial()
	put("serial", serial, ret)
	minor, ret := d.GetMinorNumber()
	put("minor", minor, ret)
	brand, ret := d.GetBrand()
	put("brand", int(brand), ret)
	arch, ret := d.GetArchitecture()
	put("architecture", int(arch), ret)
	major, _, ret := d.GetCudaComputeCapability()
	put("compute", major, ret)
	cores, ret := d.GetNumGpuCores()
	put("cores", cores, ret)
	memory, ret := d.GetMemoryInfo()
	put("memory", [3]uint64{memory.Total / miB, memory.Free / miB, memory.Used / miB}, ret)
	v2, ret := d.GetMemoryInfo_v2()
	put("memory2", [4]uint64{v2.Total / miB, v2.Reserved / miB, v2.Free / miB, v2.Used / miB}, ret)
	mode, ret := d.GetAddressingMode()
	put("addressing", int(mode.Value), ret)
	_, ret = d.GetNumaNodeId()
	put("numa", nil, ret)
	ecc, pending, ret := d.GetEccMode()
	put("ecc", [2]int{int(ecc), int(pending)}, ret)
	persistence, ret := d.GetPersistenceMode()
	put("persistence", int(persistence), ret)
	virtual, ret := d.GetVirtualizationMode()
	put("virtualization", int(virtual), ret)
	current, waiting, ret := d.GetMigMode()
	put("mig", [2]int{current, waiting}, ret)
	return out
}

func TestFacts(t *testing.T) {
	r := newRoot(t, machineOf(t4(0), h100(1)))
	r.update(func(m *machine.Machine) {
		m.Processes = []machine.Process{{PID: 4, Name: "p", GPU: 1, InstanceID: -1, ComputeID: -1, MemoryBytes: 1000 * miB}}
	})
	lib := r.open()
	want := []map[string]any{{
		"index": 0, "uuid": "GPU-00000000-0000-4000-8000-000000000000", "name": "NVIDIA T4", "serial": "1650000000000",
		"minor": 0, "brand": 14, "architecture": 6, "compute": 6, "cores": 16896,
		"memory": [3]uint64{81559, 80959, 600}, "memory2": [4]uint64{81559, 600, 80959, 0},
		"addressing": "Not Supported", "numa": "Not Supported", "ecc": "Not Supported", "persistence": 0, "virtualization": 0,
		"mig": "Not Supported",
	}, {
		"index": 1, "uuid": "GPU-00000000-0000-4000-8000-000000000001", "name": "NVIDIA H100 80GB HBM3", "serial": "1650000000001",
		"minor": 1, "brand": 14, "architecture": 9, "compute": 9, "cores": 16896,
		"memory": [3]uint64{81559, 79959, 1600}, "memory2": [4]uint64{81559, 600, 79959, 1000},
		"addressing": 1, "numa": "Not Supported", "ecc": [2]int{1, 1}, "persistence": 0, "virtualization": 0, "mig": [2]int{0, 0},
	}}
	for i, w := range want {
		expect.Same(t, facts(t, device(t, lib, i)), w, "GPU", i)
	}
}

func TestHandles(t *testing.T) {
	lib := newRoot(t, machineOf(h100(0), h100(1))).open()
	first := device(t, lib, 1)
	by := map[string]func() (nvml.Device, nvml.Return){
		"index":  func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByIndex(1) },
		"uuid":   func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByUUID(first1UUID) },
		"serial": func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleBySerial("1650000000001") },
		"bus":    func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("0000:1c:00.0") },
		"bus8":   func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("00000000:1C:00.0") },
		"short":  func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("1c:00.0") },
	}
	for name, find := range by {
		expect.Equal(t, get(find())(t, name), first, "handle by", name, "is another one")
	}
	for name, c := range map[string]struct {
		get  func() (nvml.Device, nvml.Return)
		want nvml.Return
	}{
		"index":     {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByIndex(2) }, nvml.ERROR_INVALID_ARGUMENT},
		"uuid":      {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByUUID("GPU-nope") }, nvml.ERROR_NOT_FOUND},
		"mig":       {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByUUID("MIG-nope") }, nvml.ERROR_NOT_FOUND},
		"serial":    {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleBySerial("7") }, nvml.ERROR_NOT_FOUND},
		"bus":       {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("0000:77:00.0") }, nvml.ERROR_NOT_FOUND},
		"malformed": {func() (nvml.Device, nvml.Return) { return lib.DeviceGetHandleByPciBusId("1c") }, nvml.ERROR_INVALID_ARGUMENT},
	} {
		wants(t, "unknown "+name, code(c.get()), c.want)
	}
}

const first1UUID = "GPU-00000000-0000-4000-8000-000000000001"

func TestPCI(t *testing.T) {
	d := device(t, newRoot(t, machineOf(h100(0))).open(), 0)
	info := get(d.GetPciInfo())(t, "GetPciInfo")
	got := fmt.Sprintf("%s %s %d %#x %d %#x %#x", text(info.BusId[:]), text(info.BusIdLegacy[:]), info.Domain, info.Bus, info.Device,
		info.PciDeviceId, info.PciSubSystemId)
	expect.Equal(t, got, "00000000:1B:00.0 0000:1B:00.0 0 0x1b 0 0x233010de 0x16c110de", "PCI info")
	ext := get(d.GetPciInfoExt())(t, "GetPciInfoExt")
	if ext.BaseClass != 3 || ext.SubClass != 2 || text(ext.BusId[:]) != "00000000:1B:00.0" {
		t.Errorf("PCI info with class: %+v", ext)
	}
}

func TestModes(t *testing.T) {
	r, d := oneH100(t)
	wants(t, "SetComputeMode", d.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
	wants(t, "removed compute mode", d.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_THREAD), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "unknown compute mode", d.SetComputeMode(17), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "SetPersistenceMode", d.SetPersistenceMode(nvml.FEATURE_ENABLED), nvml.SUCCESS)
	mode := get(d.GetComputeMode())(t, "GetComputeMode")
	if g := r.machine().GPUs[0]; mode != nvml.COMPUTEMODE_EXCLUSIVE_PROCESS || g.ComputeMode != 3 || !g.Persistence {
		t.Errorf("compute mode %d, in the state %d; persistence %v", mode, g.ComputeMode, g.Persistence)
	}
}

func TestUnmodelledCallsAreCounted(t *testing.T) {
	r, d := oneH100(t)
	for range 3 {
		wants(t, "GetFanSpeed", code(d.GetFanSpeed()), nvml.ERROR_NOT_SUPPORTED)
	}
	wants(t, "GetDisplayMode", code(d.GetDisplayMode()), nvml.ERROR_NOT_SUPPORTED)
	got := must.Get(r.file().Unmodelled())(t)
	expect.Same(t, got, map[string]uint64{"nvmlDeviceGetFanSpeed": 3, "nvmlDeviceGetDisplayMode": 1}, "counted calls")
}
