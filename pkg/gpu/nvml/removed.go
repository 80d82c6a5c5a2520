// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/partage-dev/partage/pkg/call"
)

// kernelDriver is the name of NVIDIA's driver for PCI devices.
const kernelDriver = "nvidia"

// Removed reports whether somebody has taken a GPU out: the kernel has no device at
// its PCI address any more, or has given it to another driver, such as vfio-pci. A GPU
// that has fallen off the bus is still there.
func (c *Client) Removed(pciAddress string) bool {
	gone, err := call.Look(context.Background(), c.calls.Of(pciAddress, "sysfs"), "look at the device", func() (bool, error) {
		return removed(filepath.Join(c.roots.Sys, "bus/pci/devices", pciAddress)), nil
	})
	return err == nil && gone
}

func removed(path string) bool {
	if _, err := os.Stat(path); err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	driver, err := os.Readlink(filepath.Join(path, "driver"))
	return err == nil && filepath.Base(driver) != kernelDriver
}
