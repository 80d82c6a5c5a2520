// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const (
	pciVendorNVIDIA = "0x10de"
	// pciClassDisplay begins the class of VGA and 3D controllers.
	pciClassDisplay = "0x03"
)

// NVIDIAGPUs returns the PCI addresses of NVIDIA's GPUs, whether or not a driver is
// loaded, except for those that are reserved for virtual machines. The error wraps
// fs.ErrNotExist where sysfs has no PCI bus.
func (r Roots) NVIDIAGPUs() ([]string, error) {
	folder := filepath.Join(r.Complete().Sys, "bus/pci/devices")
	return read(r, "", "PCI bus", "list "+folder, func() ([]string, error) { return nvidiaGPUs(folder) })
}

func nvidiaGPUs(folder string) ([]string, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var addresses []string
	for _, entry := range entries {
		found, err := isNVIDIAGPU(filepath.Join(folder, entry.Name()))
		if err != nil {
			return nil, fmt.Errorf("read PCI device %s: %w", entry.Name(), err)
		}
		if found {
			addresses = append(addresses, entry.Name())
		}
	}
	return addresses, nil
}

func isNVIDIAGPU(device string) (bool, error) {
	for name, prefix := range map[string]string{"vendor": pciVendorNVIDIA, "class": pciClassDisplay} {
		value, err := os.ReadFile(filepath.Join(device, name))
		if err != nil {
			return false, err
		}
		if !strings.HasPrefix(string(value), prefix) {
			return false, nil
		}
	}
	driver, err := os.Readlink(filepath.Join(device, "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	// vfio-pci and its variants hand the device to a virtual machine.
	return !strings.Contains(filepath.Base(driver), "vfio"), err
}
