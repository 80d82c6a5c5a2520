// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	fatal "github.com/partage-dev/partage/test/must"
)

// fakeLinks are the NVLinks of a GPU. All of them lead to switches that the machine does not see.
type fakeLinks struct {
	count int
	takes time.Duration // each call about them
}

func (d *fakeDevice) GetNvLinkState(link int) (nvml.EnableState, nvml.Return) {
	d.enter("GetNvLinkState")
	time.Sleep(d.links.takes)
	switch {
	case d.links.count == 0:
		return nvml.FEATURE_DISABLED, nvml.ERROR_NOT_SUPPORTED
	case link >= d.links.count:
		return nvml.FEATURE_DISABLED, nvml.ERROR_INVALID_ARGUMENT
	}
	return nvml.FEATURE_ENABLED, nvml.SUCCESS
}

func (d *fakeDevice) GetNvLinkRemoteDeviceType(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
	time.Sleep(d.links.takes)
	return nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS
}

func (d *fakeDevice) GetNvLinkRemotePciInfo(int) (nvml.PciInfo, nvml.Return) {
	time.Sleep(d.links.takes)
	return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
}

// linkedPair is two GPUs that NVSwitches join, with a driver that knows of no fabric.
func linkedPair(links fakeLinks) *fakeLibrary {
	return &fakeLibrary{
		missing: []string{"nvmlDeviceGetGpuFabricInfoV"},
		devices: []*fakeDevice{{busID: busID, links: links}, {busID: otherBusID, links: links}},
	}
}

// TestNVLinksThatHang: a GPU whose links hang is there all the same, and can be used. It delays a discovery
// once, and the links are known when the call has returned.
func TestNVLinksThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := linkedPair(fakeLinks{count: 18})
		c := openFake(t, lib)
		release := lib.devices[0].hang("GetNvLinkState")
		discover := func(want time.Duration, known bool) {
			t.Helper()
			var node *gpu.Node
			var err error
			elapsed := took(func() { node, err = c.Discover(t.Context()) })
			if err != nil || len(node.GPUs) != 2 || elapsed != want {
				t.Fatalf("%+v, %v after %s", node, err, elapsed)
			}
			if (node.GPUs[0].NVLink != nil) != known || node.GPUs[1].NVLink == nil {
				t.Errorf("links %+v and %+v", node.GPUs[0].NVLink, node.GPUs[1].NVLink)
			}
		}
		discover(call.SlowAfter+time.Second, false)
		discover(0, false)
		if _, err := c.Processes(t.Context(), pci); errors.Is(err, gpu.ErrHung) {
			t.Errorf("another call: %v", err)
		}
		hung := c.calls.Pending("nvml")
		release()
		<-hung.Done
		discover(0, true)
	})
}

// TestNVLinksThatAreSlow: everything waits for a discovery, so slow links delay it by the time of one
// call, and not by that of each of the 54.
func TestNVLinksThatAreSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const takes = call.SlowAfter - time.Second
		lib := linkedPair(fakeLinks{count: 18, takes: takes})
		c := openFake(t, lib)
		var node *gpu.Node
		var err error
		elapsed := took(func() { node, err = c.Discover(t.Context()) })
		if err != nil || len(node.GPUs) != 2 || elapsed > call.SlowAfter+time.Second {
			t.Errorf("%+v, %v after %s", node, err, elapsed)
		}
		time.Sleep(takes) // the last ones return
	})
}

// TestPCIeSwitch: which of the paths that sysfs has on machines of different kinds lead through a switch.
func TestPCIeSwitch(t *testing.T) {
	const address = "0000:1b:00.0"
	for name, test := range map[string]struct {
		path, want string
		fails      bool
	}{
		"root port":          {path: "pci0000:16/0000:16:01.0/" + address},
		"on the root":        {path: "pci0000:00/" + address},
		"switch":             {path: "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/" + address, want: "0000:17:00.0"},
		"two levels":         {path: "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0/" + address, want: "0000:17:00.0"},
		"bridge":             {path: "pci0000:16/0000:16:01.0/0000:17:00.0/" + address},
		"root behind a VMD":  {path: "pci0000:80/0000:80:00.5/pci10000:80/10000:80:01.0/" + address},
		"switch after a VMD": {path: "pci0000:80/0000:80:00.5/pci10000:80/10000:80:01.0/10000:81:00.0/10000:82:00.0/" + address, want: "10000:81:00.0"},
		"device tree":        {path: "platform/14100000.pcie/pci0005:00/0005:00:00.0/" + address},
		"Hyper-V":            {path: "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001-0000-3130-444531303438/pci0001:00/" + address},
		"no PCI":             {path: "virtual/misc/" + address, fails: true},
	} {
		sys := t.TempDir()
		devices := filepath.Join(sys, "bus/pci/devices")
		fatal.Do(t, os.MkdirAll(devices, 0o755))
		fatal.Do(t, os.Symlink("../../../devices/"+test.path, filepath.Join(devices, address)))
		if got, err := pcieSwitch(sys, address); got != test.want || (err != nil) != test.fails {
			t.Errorf("%s: %q, %v; want %q", name, got, err, test.want)
		}
	}
	sys := t.TempDir()
	if got, err := pcieSwitch(sys, address); err == nil {
		t.Errorf("without sysfs: %q", got)
	}
}
