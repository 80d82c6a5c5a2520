// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	fatal "github.com/partage-dev/partage/test/must"
)

const (
	pci   = "0000:1b:00.0"
	busID = "00000000:1B:00.0"
)

func TestOpenFailures(t *testing.T) {
	tests := map[string]struct {
		lib  *fakeLibrary
		is   error
		says string
	}{
		"no kernel driver": {
			lib: &fakeLibrary{initResult: nvml.ERROR_DRIVER_NOT_LOADED}, is: gpu.ErrDriverNotLoaded, says: "fake",
		},
		"library cannot be loaded": {
			lib: &fakeLibrary{initResult: nvml.ERROR_LIBRARY_NOT_FOUND}, is: gpu.ErrDriverNotLoaded,
		},
		"no permission": {
			lib: &fakeLibrary{initResult: nvml.ERROR_NO_PERMISSION}, is: gpu.ErrNoPermission,
		},
		"versions differ": {
			lib: &fakeLibrary{initResult: nvml.ERROR_LIB_RM_VERSION_MISMATCH}, is: gpu.ErrVersionMismatch, says: "reload",
		},
		"old driver": {
			lib: &fakeLibrary{version: "515.105.01"}, is: gpu.ErrNotSupported, says: "the driver is 515.105.01, R525 or newer is needed",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := New(Options{})
			c.uses(test.lib)
			err := c.Open(t.Context())
			if err == nil || (test.is != nil && !errors.Is(err, test.is)) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v does not wrap %v and say %q", err, test.is, test.says)
			}
			expect.Is(t, expect.Err(c.Discover(t.Context())), gpu.ErrDriverNotLoaded, "discovery without session")
		})
	}
}

func TestOpenWithoutLibrary(t *testing.T) {
	c := New(Options{Roots: host.Roots{Driver: t.TempDir()}})
	expect.Is(t, c.Open(t.Context()), gpu.ErrDriverNotLoaded)
}

func TestOpenOnce(t *testing.T) {
	lib := &fakeLibrary{}
	c := openFake(t, lib)
	if err := c.Open(t.Context()); err != nil || lib.inits != 1 {
		t.Errorf("%d initialisations, %v", lib.inits, err)
	}
	c.Close()
	c.Close()
	expect.Equal(t, lib.shutdowns, 1, "shutdowns")
	if err := c.Open(t.Context()); err != nil || lib.inits != 2 {
		t.Errorf("open again: %d initialisations, %v", lib.inits, err)
	}
}

// A session whose driver has gone is replaced, and only such a one.
func TestDeadSessionIsReplaced(t *testing.T) {
	for ret, replaced := range map[nvml.Return]bool{
		nvml.ERROR_UNINITIALIZED: true, nvml.ERROR_DRIVER_NOT_LOADED: true, nvml.ERROR_UNKNOWN: false,
	} {
		before, after := &fakeLibrary{}, &fakeLibrary{devices: []*fakeDevice{{busID: busID}}}
		c := openFake(t, before)
		c.load = func(string) nvml.Interface { return after }
		before.countResult = ret
		if err := c.Open(t.Context()); (err == nil) != replaced {
			t.Errorf("code %d: %v", ret, err)
		}
		if (before.shutdowns == 1) != replaced || (after.inits == 1) != replaced {
			t.Errorf("code %d: %d shutdowns, %d initialisations", ret, before.shutdowns, after.inits)
		}
		if node, err := c.Discover(t.Context()); replaced && (err != nil || len(node.GPUs) != 1) {
			t.Errorf("code %d: discovery: %+v, %v", ret, node, err)
		}
		c.Close()
	}
}

// A driver that does not come back is reported as an absent one is.
func TestDeadSessionAndNoDriver(t *testing.T) {
	lib := &fakeLibrary{}
	c := openFake(t, lib)
	lib.countResult, lib.initResult = nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_DRIVER_NOT_LOADED
	for range 2 {
		expect.Is(t, c.Open(t.Context()), gpu.ErrDriverNotLoaded)
	}
	if lib.shutdowns != 1 || lib.inits != 3 {
		t.Errorf("%d shutdowns, %d initialisations", lib.shutdowns, lib.inits)
	}
	lib.countResult, lib.initResult = nvml.SUCCESS, nvml.SUCCESS
	expect.Do(t, c.Open(t.Context()), "the driver is back")
}

// The library that is called first is that of the process, even if there was no
// driver behind it.
func TestUpgradedDriverNeedsNewProcess(t *testing.T) {
	was := bound.Swap(nil)
	t.Cleanup(func() { bound.Store(was) })
	folder := t.TempDir()
	for _, step := range []struct {
		version    string
		initResult nvml.Return
		want       error
	}{
		{"570.10.01", nvml.ERROR_LIBRARY_NOT_FOUND, gpu.ErrDriverNotLoaded},
		{"580.95.05", nvml.ERROR_DRIVER_NOT_LOADED, gpu.ErrDriverNotLoaded},
		{"590.10.01", nvml.SUCCESS, ErrRestartRequired},
		{"580.95.05", nvml.SUCCESS, nil},
	} {
		path := filepath.Join(folder, "libnvidia-ml.so."+step.version)
		fatal.Do(t, os.WriteFile(path, nil, 0o600))
		link := filepath.Join(folder, "libnvidia-ml.so.1")
		fatal.Do(t, errors.Join(os.RemoveAll(link), os.Symlink(path, link)))
		c := New(Options{})
		c.uses(&fakeLibrary{initResult: step.initResult})
		c.find = func() (string, error) { return link, nil }
		expect.Is(t, c.Open(t.Context()), step.want, step.version)
	}
}

func TestDiscoverGoesOnAfterBrokenGPU(t *testing.T) {
	c := openFake(t, &fakeLibrary{
		devices: []*fakeDevice{
			{busID: "00000000:DB:00.0"},
			{busID: "00000000:2C:00.0", uuidResult: nvml.ERROR_GPU_IS_LOST},
			{},
			{busID: busID},
		},
		broken: map[int]nvml.Return{2: nvml.ERROR_RESET_REQUIRED},
	})
	node := fatal.Get(c.Discover(t.Context()))(t)
	type fault struct {
		index int
		pci   string
		is    error
	}
	for i, want := range []fault{{1, "0000:2c:00.0", gpu.ErrLost}, {2, "", gpu.ErrResetRequired}} {
		if i >= len(node.Broken) {
			t.Fatalf("broken GPUs: %+v", node.Broken)
		}
		got := node.Broken[i]
		if got.Index != want.index || got.PCIAddress != want.pci || !errors.Is(got.Err, want.is) || got.Reason == "" {
			t.Errorf("broken GPU %+v, want %+v", got, want)
		}
	}
	// What a GPU does not support is left empty, and the order is the PCI bus's.
	want := &gpu.Node{
		DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 12, Minor: 8},
		GPUs: []gpu.GPU{
			{PCIAddress: pci, PCIDeviceID: "10de:2330", UUID: "GPU-" + busID, Brand: "Unknown", Architecture: "Unknown"},
			{PCIAddress: "0000:db:00.0", PCIDeviceID: "10de:2330", UUID: "GPU-00000000:DB:00.0", Brand: "Unknown", Architecture: "Unknown"},
		},
	}
	node.Broken = nil
	expect.Same(t, node, want, "node")
}

// TestDiscoverGoesOnAfterPanic: a defect that one GPU triggers costs that GPU only.
func TestDiscoverGoesOnAfterPanic(t *testing.T) {
	d := &fakeDevice{busID: busID}
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{d, {busID: "00000000:DB:00.0"}}})
	for _, d.panic = range []bool{false, true} {
		node := fatal.Get(c.Discover(t.Context()))(t)
		if !d.panic {
			continue // from now on its address is known
		}
		if len(node.GPUs) != 1 || len(node.Broken) != 1 {
			t.Fatalf("node %+v, want one GPU and one that is broken", node)
		}
		if got := node.Broken[0]; got.PCIAddress != pci || !strings.Contains(got.Reason, "no UUID") {
			t.Errorf("broken GPU %+v, want %s because of the panic", got, pci)
		}
	}
}

func TestContextIsHonoured(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{{busID: busID, mig: true}}})
	expect.Is(t, expect.Err(c.Discover(ctx)), context.Canceled, "Discover")
	_, err := c.MIGState(ctx, pci)
	var failed *gpu.Error
	if !errors.Is(err, context.Canceled) || !errors.As(err, &failed) || failed.PCIAddress != pci {
		t.Errorf("MIGState: %v", err)
	}
}

func TestHandles(t *testing.T) {
	old := &fakeDevice{busID: busID, mig: true}
	lib := &fakeLibrary{devices: []*fakeDevice{old}}
	c := openFake(t, lib)
	read := func() error {
		_, err := c.MIGState(t.Context(), pci)
		return err
	}
	if err := errors.Join(read(), read()); err != nil || lib.lookups != 1 {
		t.Errorf("%d look-ups for two calls, %v", lib.lookups, err)
	}
	// A reset: the old handle is not known any more.
	old.stale = true
	lib.devices[0] = &fakeDevice{busID: busID, mig: true}
	if err := read(); err != nil || lib.lookups != 2 {
		t.Errorf("after a reset: %d look-ups, %v", lib.lookups, err)
	}
	// A refusal that has nothing to do with the handle is passed on.
	lib.devices[0].stale = true
	if err := read(); !errors.Is(err, gpu.ErrInvalid) || lib.lookups != 3 {
		t.Errorf("refusal: %d look-ups, %v", lib.lookups, err)
	}
	lib.devices = nil
	if err := read(); !errors.Is(err, gpu.ErrInvalid) || !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("gone: %v", err)
	}
}

func TestErrorNamesCallAndGPU(t *testing.T) {
	c := openFake(t, &fakeLibrary{})
	_, err := c.MIGState(t.Context(), pci)
	var failed *gpu.Error
	if !errors.As(err, &failed) || !errors.Is(err, gpu.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if failed.Call != "nvmlDeviceGetHandleByPciBusId_v2" || failed.PCIAddress != pci || !strings.Contains(failed.Text, "6") {
		t.Errorf("got %+v", failed)
	}
}

func TestPCIAddress(t *testing.T) {
	tests := map[string]struct {
		busID, want string
		fails       bool
	}{
		"as NVML writes it":              {busID: "00000000:1B:00.0", want: "0000:1b:00.0"},
		"as the kernel does":             {busID: "0000:1b:00.0", want: "0000:1b:00.0"},
		"domain":                         {busID: "00000001:C1:02.3", want: "0001:c1:02.3"},
		"domain of a machine in a cloud": {busID: "00009C2B:00:00.0", want: "9c2b:00:00.0"},
		"more than 16 bits":              {busID: "00010000:E1:00.0", want: "10000:e1:00.0"},
		"empty":                          {fails: true},
		"no function":                    {busID: "0000:1b:00", fails: true},
		"no domain":                      {busID: "1b:00.0", fails: true},
		"not hexadecimal":                {busID: "0000:xx:00.0", fails: true},
		"too large":                      {busID: "100000000:1b:00.0", fails: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := pciAddress(test.busID)
			if got != test.want || (err != nil) != test.fails {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestPCIDeviceID(t *testing.T) {
	for combined, want := range map[uint32]string{0x233010de: "10de:2330", 0x00fa10de: "10de:00fa", 0: ""} {
		if got := pciDeviceID(combined); got != want {
			t.Errorf("%#x: got %q, want %q", combined, got, want)
		}
	}
}

func TestLibraryVersion(t *testing.T) {
	tests := map[string]string{
		"/usr/lib64/libnvidia-ml.so.580.95.05": "580.95.05",
		"/usr/lib64/libnvidia-ml.so.1":         "",
		"libnvidia-ml.so":                      "",
		"":                                     "",
	}
	for path, want := range tests {
		expect.Equal(t, libraryVersion(path), want, path)
	}
}

func TestRemoved(t *testing.T) {
	sys := t.TempDir()
	devices := filepath.Join(sys, "bus/pci/devices")
	for address, driver := range map[string]string{"0000:1b:00.0": "nvidia", "0000:28:00.0": "vfio-pci", "0000:35:00.0": ""} {
		fatal.Do(t, os.MkdirAll(filepath.Join(devices, address), 0o700))
		if driver == "" {
			continue
		}
		fatal.Do(t, os.Symlink("../../../../bus/pci/drivers/"+driver, filepath.Join(devices, address, "driver")))
	}
	c := New(Options{Roots: host.Roots{Sys: sys}})
	for address, want := range map[string]bool{
		"0000:1b:00.0": false,
		"0000:28:00.0": true,
		"0000:35:00.0": false, // the driver is not loaded
		"0000:41:00.0": true,
	} {
		expect.Equal(t, c.Removed(address), want, "GPU", address)
	}
}
