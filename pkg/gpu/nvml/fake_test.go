// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	fatal "github.com/partage-dev/partage/test/must"
)

// fakeLibrary stands in for the few functions of the library that a test
// needs. The embedded nil interface makes any other call panic. What the real
// bindings do is tested against the simulated library.
type fakeLibrary struct {
	nvml.Interface
	stuck
	initResult nvml.Return
	missing    []string // symbols that it lacks
	devices    []*fakeDevice
	broken     map[int]nvml.Return // by index

	countResult nvml.Return
	version     string // of the driver; R580 by default

	inits, shutdowns, lookups int
}

// stuck makes calls hang, as in the kernel driver. Its zero value does not.
type stuck struct {
	mu    sync.Mutex
	calls map[string]chan struct{}
	made  map[string]int // also those that hang
}

// hang makes calls of this method wait until release is called.
func (s *stuck) hang(method string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls == nil {
		s.calls = map[string]chan struct{}{}
	}
	until := make(chan struct{})
	s.calls[method] = until
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.calls, method)
		close(until)
	}
}

// enter begins every method that a test lets hang.
func (s *stuck) enter(method string) {
	s.mu.Lock()
	if s.made == nil {
		s.made = map[string]int{}
	}
	s.made[method]++
	until := s.calls[method]
	s.mu.Unlock()
	if until != nil {
		<-until
	}
}

// count is how often the method was called.
func (s *stuck) count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.made[method]
}

func (l *fakeLibrary) InitWithFlags(uint32) nvml.Return {
	l.enter("InitWithFlags")
	l.inits++
	return l.initResult
}

func (l *fakeLibrary) Shutdown() nvml.Return {
	l.enter("Shutdown")
	l.shutdowns++
	return nvml.SUCCESS
}

func (l *fakeLibrary) Extensions() nvml.ExtendedInterface { return l }

func (l *fakeLibrary) LookupSymbol(name string) error {
	if slices.Contains(l.missing, name) {
		return errors.New("no such symbol")
	}
	return nil
}

func (l *fakeLibrary) SystemGetDriverVersion() (string, nvml.Return) {
	return cmp.Or(l.version, "580.95.05"), nvml.SUCCESS
}

func (l *fakeLibrary) SystemGetCudaDriverVersion_v2() (int, nvml.Return) {
	return 12080, nvml.SUCCESS
}

func (l *fakeLibrary) DeviceGetCount() (int, nvml.Return) {
	l.enter("DeviceGetCount")
	return len(l.devices), l.countResult
}

func (l *fakeLibrary) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	l.enter(fmt.Sprintf("DeviceGetHandleByIndex %d", index))
	if ret := l.broken[index]; ret != nvml.SUCCESS {
		return nil, ret
	}
	return l.devices[index], nvml.SUCCESS
}

func (l *fakeLibrary) DeviceGetHandleByPciBusId(pci string) (nvml.Device, nvml.Return) {
	l.lookups++
	for _, d := range l.devices {
		if address, _ := pciAddress(d.busID); address == pci {
			return d, nvml.SUCCESS
		}
	}
	return nil, nvml.ERROR_NOT_FOUND
}

// fakeDevice is a GPU. Its zero value supports nothing but to be identified.
type fakeDevice struct {
	nvml.Device
	stuck
	busID string
	stale bool // as after a reset: every call fails
	panic bool // instead of a UUID

	uuidResult     nvml.Return
	arch           nvml.DeviceArchitecture
	virtualization nvml.GpuVirtualizationMode
	memory         uint64
	reserved       uint64
	memoryResult   nvml.Return

	mig              bool
	current, pending int
	processesResult  nvml.Return // of the list of compute processes
	setMode          func(d *fakeDevice, mode int) (activation, ret nvml.Return)
	profiles         map[int]nvml.GpuInstanceProfileInfo // by enum
	lastEnum         int
	placements       map[uint32][]nvml.GpuInstancePlacement
	instances        []*fakeInstance
	processes        []nvml.ProcessInfo

	// infoResult is that of instances that are created from now on.
	infoResult nvml.Return

	compute fakeComputeMode
	links   fakeLinks
}

// fakeComputeMode is the compute mode of a GPU.
type fakeComputeMode struct {
	mode   nvml.ComputeMode
	kept   bool // a change is answered with success and not made
	result nvml.Return
	sets   int
}

func (d *fakeDevice) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	return d.compute.mode, nvml.SUCCESS
}

func (d *fakeDevice) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	d.compute.sets++
	if d.compute.result == nvml.SUCCESS && !d.compute.kept {
		d.compute.mode = mode
	}
	return d.compute.result
}

func (d *fakeDevice) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	var info nvml.PciInfo
	for i := range len(d.busID) {
		info.BusId[i] = int8(d.busID[i])
	}
	info.PciDeviceId = 0x233010de
	return info, nvml.SUCCESS
}

func (d *fakeDevice) GetUUID() (string, nvml.Return) {
	d.enter("GetUUID")
	if d.panic {
		panic("no UUID")
	}
	return "GPU-" + d.busID, d.uuidResult
}

func (d *fakeDevice) GetMinorNumber() (int, nvml.Return) { return 0, nvml.SUCCESS }
func (d *fakeDevice) GetName() (string, nvml.Return)     { return "", nvml.ERROR_NOT_SUPPORTED }

func (d *fakeDevice) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	if d.arch == 0 {
		return nvml.DEVICE_ARCH_UNKNOWN, nvml.ERROR_NOT_SUPPORTED
	}
	return d.arch, nvml.SUCCESS
}

func (d *fakeDevice) GetCudaComputeCapability() (int, int, nvml.Return) {
	return 0, 0, nvml.ERROR_NOT_SUPPORTED
}

func (d *fakeDevice) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	switch {
	case d.memoryResult != nvml.SUCCESS:
		return nvml.Memory{}, d.memoryResult
	case d.memory == 0:
		return nvml.Memory{}, nvml.ERROR_NOT_SUPPORTED
	}
	return nvml.Memory{Total: d.memory}, nvml.SUCCESS
}

func (d *fakeDevice) GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return) {
	d.enter("GetMemoryInfo_v2")
	if d.reserved == 0 {
		return nvml.Memory_v2{}, nvml.ERROR_NOT_SUPPORTED
	}
	return nvml.Memory_v2{Total: d.memory, Reserved: d.reserved}, nvml.SUCCESS
}

func (d *fakeDevice) GetMemoryLimits_v1(string) (nvml.MemoryLimits_v1, nvml.Return) {
	return nvml.MemoryLimits_v1{}, nvml.ERROR_NOT_SUPPORTED
}

func (d *fakeDevice) GetBrand() (nvml.BrandType, nvml.Return) {
	return nvml.BRAND_NVIDIA, nvml.ERROR_NOT_SUPPORTED
}

func (d *fakeDevice) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	return nvml.DeviceAddressingMode{Value: 1}, nvml.ERROR_NOT_SUPPORTED
}

func (d *fakeDevice) GetVirtualizationMode() (nvml.GpuVirtualizationMode, nvml.Return) {
	return d.virtualization, nvml.SUCCESS
}

func (d *fakeDevice) GetMigMode() (int, int, nvml.Return) {
	d.enter("GetMigMode")
	switch {
	case d.stale:
		return 0, 0, nvml.ERROR_INVALID_ARGUMENT
	case !d.mig:
		return 0, 0, nvml.ERROR_NOT_SUPPORTED
	}
	return d.current, d.pending, nvml.SUCCESS
}

func (d *fakeDevice) SetMigMode(mode int) (nvml.Return, nvml.Return) {
	d.enter("SetMigMode")
	return d.setMode(d, mode)
}

func (d *fakeDevice) GetGpuInstanceProfileInfo(enum int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	if info, ok := d.profiles[enum]; ok {
		return info, nvml.SUCCESS
	}
	if enum > d.lastEnum {
		return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
}

func (d *fakeDevice) GetGpuInstancePossiblePlacements(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
	places, ok := d.placements[info.Id]
	if !ok {
		return nil, nvml.ERROR_NOT_SUPPORTED
	}
	return places, nvml.SUCCESS
}

func (d *fakeDevice) GetGpuInstanceById(id int) (nvml.GpuInstance, nvml.Return) {
	if d.current == 0 {
		return nil, nvml.ERROR_NOT_SUPPORTED
	}
	for _, i := range d.instances {
		if int(i.id) == id {
			return i, nvml.SUCCESS
		}
	}
	return nil, nvml.ERROR_NOT_FOUND
}

func (d *fakeDevice) CreateGpuInstanceWithPlacement(
	info *nvml.GpuInstanceProfileInfo, at *nvml.GpuInstancePlacement,
) (nvml.GpuInstance, nvml.Return) {
	d.enter("CreateGpuInstanceWithPlacement")
	made := &fakeInstance{device: d, id: 13, profile: info.Id, at: *at, infoResult: d.infoResult}
	d.instances = append(d.instances, made)
	return made, nvml.SUCCESS
}

func (d *fakeDevice) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	d.enter("GetComputeRunningProcesses")
	return d.processes, d.processesResult
}

func (d *fakeDevice) GetGraphicsRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return nil, nvml.ERROR_NOT_SUPPORTED
}

// fakeInstance is a GPU instance.
type fakeInstance struct {
	nvml.GpuInstance
	device     *fakeDevice
	id         uint32
	profile    uint32
	at         nvml.GpuInstancePlacement
	infoResult nvml.Return
	compute    map[int]nvml.ComputeInstanceProfileInfo // by enum
	created    []uint32                                // profile ids
	uuid       string
	destroyed  int // compute instances
	// What destroying it leaves: itself, or a GPU that does not support to be asked.
	stays, modeGoes bool
}

func (i *fakeInstance) GetInfo() (nvml.GpuInstanceInfo, nvml.Return) {
	i.device.enter("instance GetInfo")
	return nvml.GpuInstanceInfo{Id: i.id, ProfileId: i.profile, Placement: i.at}, i.infoResult
}

func (i *fakeInstance) Destroy() nvml.Return {
	i.device.enter("instance Destroy")
	if i.modeGoes {
		i.device.current = nvml.DEVICE_MIG_DISABLE
	}
	i.device.instances = slices.DeleteFunc(i.device.instances, func(o *fakeInstance) bool { return o == i && !i.stays })
	return nvml.SUCCESS
}

func (i *fakeInstance) GetComputeInstanceProfileInfo(enum, _ int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
	if info, ok := i.compute[enum]; ok {
		return info, nvml.SUCCESS
	}
	if enum >= nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.ComputeInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
}

func (i *fakeInstance) CreateComputeInstance(info *nvml.ComputeInstanceProfileInfo) (nvml.ComputeInstance, nvml.Return) {
	i.created = append(i.created, info.Id)
	return fakeCompute{instance: i}, nvml.SUCCESS
}

// fakeCompute is a compute instance.
type fakeCompute struct {
	nvml.ComputeInstance
	instance *fakeInstance
}

func (c fakeCompute) GetInfo() (nvml.ComputeInstanceInfo, nvml.Return) {
	return nvml.ComputeInstanceInfo{Device: fakeMIGDevice{uuid: c.instance.uuid}}, nvml.SUCCESS
}

func (c fakeCompute) Destroy() nvml.Return {
	c.instance.destroyed++
	return nvml.SUCCESS
}

type fakeMIGDevice struct {
	nvml.Device
	uuid string
}

func (d fakeMIGDevice) GetUUID() (string, nvml.Return) { return d.uuid, nvml.SUCCESS }

// uses lets a client find and load lib.
func (c *Client) uses(lib nvml.Interface) {
	c.find = func() (string, error) { return "fake", nil }
	c.load = func(string) nvml.Interface { return lib }
}

// openFake returns a client on lib.
func openFake(t *testing.T, lib *fakeLibrary) *Client {
	t.Helper()
	lib.missing = append(lib.missing, "nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
	c := New(Options{})
	c.roots.Sys = t.TempDir()
	c.uses(lib)
	fatal.Do(t, c.Open(t.Context()))
	return c
}
