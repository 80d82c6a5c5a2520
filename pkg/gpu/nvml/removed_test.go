// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/node/host"
)

func TestRemoved(t *testing.T) {
	sys := t.TempDir()
	devices := filepath.Join(sys, "bus/pci/devices")
	for address, driver := range map[string]string{"0000:1b:00.0": "nvidia", "0000:28:00.0": "vfio-pci", "0000:35:00.0": ""} {
		if err := os.MkdirAll(filepath.Join(devices, address), 0o700); err != nil {
			t.Fatal(err)
		}
		if driver == "" {
			continue
		}
		if err := os.Symlink("../../../../bus/pci/drivers/"+driver, filepath.Join(devices, address, "driver")); err != nil {
			t.Fatal(err)
		}
	}
	c := New(Options{Roots: host.Roots{Sys: sys}})
	for address, want := range map[string]bool{
		"0000:1b:00.0": false,
		"0000:28:00.0": true,
		"0000:35:00.0": false, // the driver is not loaded
		"0000:41:00.0": true,
	} {
		if got := c.Removed(address); got != want {
			t.Errorf("GPU %s: got %t, want %t", address, got, want)
		}
	}
}
