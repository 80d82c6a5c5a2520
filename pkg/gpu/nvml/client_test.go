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
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
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
			if _, err := c.Discover(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
				t.Errorf("discovery without session: %v", err)
			}
		})
	}
}

func TestOpenWithoutLibrary(t *testing.T) {
	c := New(Options{Roots: host.Roots{Driver: t.TempDir()}})
	if err := c.Open(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("got %v", err)
	}
}

func TestOpenOnce(t *testing.T) {
	lib := &fakeLibrary{}
	c := openFake(t, lib)
	if err := c.Open(t.Context()); err != nil || lib.inits != 1 {
		t.Errorf("%d initialisations, %v", lib.inits, err)
	}
	c.Close()
	c.Close()
	if lib.shutdowns != 1 {
		t.Errorf("%d shutdowns", lib.shutdowns)
	}
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
		if err := c.Open(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
			t.Errorf("got %v", err)
		}
	}
	if lib.shutdowns != 1 || lib.inits != 3 {
		t.Errorf("%d shutdowns, %d initialisations", lib.shutdowns, lib.inits)
	}
	lib.countResult, lib.initResult = nvml.SUCCESS, nvml.SUCCESS
	if err := c.Open(t.Context()); err != nil {
		t.Errorf("the driver is back: %v", err)
	}
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
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(folder, "libnvidia-ml.so.1")
		if err := errors.Join(os.RemoveAll(link), os.Symlink(path, link)); err != nil {
			t.Fatal(err)
		}
		c := New(Options{})
		c.uses(&fakeLibrary{initResult: step.initResult})
		c.find = func() (string, error) { return link, nil }
		if err := c.Open(t.Context()); !errors.Is(err, step.want) {
			t.Errorf("%s: %v, want %v", step.version, err, step.want)
		}
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
	node, err := c.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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
	if diff := cmp.Diff(want, node); diff != "" {
		t.Errorf("node (-want +got):\n%s", diff)
	}
}

// TestDiscoverGoesOnAfterPanic: a defect that one GPU triggers costs that GPU only.
func TestDiscoverGoesOnAfterPanic(t *testing.T) {
	d := &fakeDevice{busID: busID}
	c := openFake(t, &fakeLibrary{devices: []*fakeDevice{d, {busID: "00000000:DB:00.0"}}})
	for _, d.panic = range []bool{false, true} {
		node, err := c.Discover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
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
	if _, err := c.Discover(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Discover: %v", err)
	}
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
