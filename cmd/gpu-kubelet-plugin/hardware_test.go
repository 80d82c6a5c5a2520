// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
)

// TestUnlisted: GPUs on the PCI bus, also those without a kernel driver, that NVML does not
// list. Other devices, and GPUs for virtual machines, are not meant.
func TestUnlisted(t *testing.T) {
	t.Parallel()
	sys := t.TempDir()
	add := func(address, vendor, class, driver string) {
		folder := filepath.Join(sys, "bus/pci/devices", address)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"vendor": vendor, "class": class} {
			if err := os.WriteFile(filepath.Join(folder, name), []byte(value+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if driver == "" {
			return
		}
		if err := os.Symlink("../../../bus/pci/drivers/"+driver, filepath.Join(folder, "driver")); err != nil {
			t.Fatal(err)
		}
	}
	add("0000:1b:00.0", "0x10de", "0x030200", "nvidia")
	add("0000:2c:00.0", "0x10de", "0x030200", "nvidia")
	add("0000:3d:00.0", "0x10de", "0x030200", "nvidia")
	add("0000:4e:00.0", "0x10de", "0x030200", "")
	add("0000:5f:00.0", "0x10de", "0x030200", "vfio-pci")
	add("0000:60:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
	add("0000:71:00.0", "0x8086", "0x030000", "i915")
	node := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: "0000:1b:00.0"}}, Broken: []gpu.Broken{{PCIAddress: "0000:2c:00.0"}}}
	roots := host.Roots{Sys: sys}
	if got, want := unlisted(roots, node), []string{"0000:3d:00.0", "0000:4e:00.0"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	node.Broken = append(node.Broken, gpu.Broken{Index: 2})
	if got := unlisted(roots, node); len(got) > 0 {
		t.Errorf("with one that does not tell its address: %v", got)
	}
	if got := unlisted(host.Roots{Sys: t.TempDir()}, node); len(got) > 0 {
		t.Errorf("without a bus: %v", got)
	}
}
