// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNVIDIAGPUs(t *testing.T) {
	root, roots := tree(t)
	if _, err := roots.NVIDIAGPUs(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a PCI bus: %v", err)
	}
	for address, device := range map[string]struct{ vendor, class, driver string }{
		"0000:00:00.0": {"0x8086", "0x060000", ""},       // host bridge
		"0000:00:02.0": {"0x1af4", "0x030000", ""},       // another vendor's display
		"0000:17:00.0": {"0x10de", "0x068000", ""},       // NVSwitch
		"0000:19:00.1": {"0x10de", "0x040300", ""},       // audio of a GPU
		"0000:1b:00.0": {"0x10de", "0x030200", "nvidia"}, // 3D controller
		"0000:43:00.0": {"0x10de", "0x030000", ""},       // VGA, no driver
		"0000:52:00.0": {"0x10de", "0x030200", "vfio-pci"},
		"0000:61:00.0": {"0x10de", "0x030200", "nvgrace_gpu_vfio_pci"},
	} {
		folder := "sys/bus/pci/devices/" + address
		write(t, root, folder+"/vendor", device.vendor+"\n")
		write(t, root, folder+"/class", device.class+"\n")
		if device.driver != "" {
			link(t, root, folder+"/driver", "../../../bus/pci/drivers/"+device.driver)
		}
	}
	got, err := roots.NVIDIAGPUs()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"0000:1b:00.0", "0000:43:00.0"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
