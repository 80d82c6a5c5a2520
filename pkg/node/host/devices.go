// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// capabilityDriver is the name under which the kernel module registers the
// device numbers of capability nodes.
const capabilityDriver = "nvidia-caps"

// minorBits is the width of a minor number in the kernel's dev_t.
const minorBits = 20

// ErrNotCharDevice says that a path exists and is no character device.
var ErrNotCharDevice = errors.New("not a character device")

// CharDevice returns the device number of a node, for example of
// "/dev/nvidia0". Its errors are those of Node.
func (r Roots) CharDevice(path string) (major, minor int64, err error) {
	node, err := r.Node(path)
	return node.Major, node.Minor, err
}

// GPUMinor returns N of /dev/nvidiaN for the GPU at a PCI address, which is
// "dddd:bb:dd.f" in lower case. The driver renumbers GPUs when it is loaded
// again, and may do so when the MIG mode changes: a minor is not to be cached.
// The error wraps fs.ErrNotExist when the driver has no GPU at this address.
func (r Roots) GPUMinor(pciAddress string) (int, error) {
	path := filepath.Join(r.Complete().Proc, "driver/nvidia/gpus", pciAddress, "information")
	data, err := r.driverFile(pciAddress, "files", path)
	if err != nil {
		return 0, fmt.Errorf("read the device minor of GPU %s: %w", pciAddress, err)
	}
	minor, err := parseMinor(data, "Device Minor")
	if err != nil {
		return 0, fmt.Errorf("read the device minor of GPU %s from %s: %w", pciAddress, path, err)
	}
	return int(minor), nil
}

// CapabilityMajor returns the major number of capability nodes, which the kernel
// assigns when the driver is loaded. The error wraps fs.ErrNotExist when the driver
// has not registered any.
func (r Roots) CapabilityMajor() (int64, error) {
	path := filepath.Join(r.Complete().Proc, "devices")
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("major number of %s: %w", capabilityDriver, err)
	}
	major, found, err := parseMajor(data, capabilityDriver)
	if err != nil {
		return 0, fmt.Errorf("major number of %s in %s: %w", capabilityDriver, path, err)
	}
	if !found {
		return 0, fmt.Errorf("%s lists no %s, the driver has no MIG capabilities: %w", path, capabilityDriver, fs.ErrNotExist)
	}
	return major, nil
}

// parseMajor reads a character device's major from the format of
// /proc/devices: two sections of "<major> <name>" lines.
func parseMajor(data []byte, driver string) (major int64, found bool, err error) {
	_, characters, _ := strings.Cut(string(data), "Character devices:")
	characters, _, _ = strings.Cut(characters, "Block devices:")
	for line := range strings.Lines(characters) {
		line = strings.TrimSpace(line)
		number, name, _ := strings.Cut(line, " ")
		if strings.TrimSpace(name) != driver {
			continue
		}
		major, err := strconv.ParseUint(number, 10, 31)
		if err != nil {
			return 0, false, fmt.Errorf("line %q: %w", line, err)
		}
		return int64(major), true, nil
	}
	return 0, false, nil
}

// InstanceCapability returns the minor number of the capability node of a GPU
// instance. gpuMinor is N of /dev/nvidiaN. While the instance does not exist the
// error wraps fs.ErrNotExist.
func (r Roots) InstanceCapability(gpuMinor, gi int) (int64, error) {
	return r.capabilityMinor(filepath.Join(r.instanceFolder(gpuMinor, gi), "access"))
}

// ComputeCapability returns the same for a compute instance.
func (r Roots) ComputeCapability(gpuMinor, gi, ci int) (int64, error) {
	return r.capabilityMinor(filepath.Join(r.instanceFolder(gpuMinor, gi), "ci"+strconv.Itoa(ci), "access"))
}

// MonitorCapability returns the minor number of the capability node that lets a process
// monitor all MIG instances of all GPUs. The error wraps fs.ErrNotExist where the driver
// has no MIG.
func (r Roots) MonitorCapability() (int64, error) {
	return r.capabilityMinor(filepath.Join(r.Complete().Proc, "driver/nvidia/capabilities/mig/monitor"))
}

func (r Roots) instanceFolder(gpuMinor, gi int) string {
	return filepath.Join(r.Complete().Proc, "driver/nvidia/capabilities",
		"gpu"+strconv.Itoa(gpuMinor), "mig", "gi"+strconv.Itoa(gi))
}

func (r Roots) capabilityMinor(path string) (int64, error) {
	data, err := r.driverFile("", path, path)
	if err != nil {
		return 0, fmt.Errorf("capability file: %w", err)
	}
	minor, err := parseMinor(data, "DeviceFileMinor")
	if err != nil {
		return 0, fmt.Errorf("capability file %s: %w", path, err)
	}
	return minor, nil
}

// parseMinor reads a minor number from the line "<field>: <n>" of a file of
// the NVIDIA driver.
func parseMinor(data []byte, field string) (int64, error) {
	value, found := valueOf(data, field)
	if !found {
		return 0, fmt.Errorf("expected a line %q, found none", field+": <minor number>")
	}
	minor, err := strconv.ParseUint(value, 10, minorBits)
	if err != nil {
		return 0, fmt.Errorf("%s: expected a minor number: %w", field, err)
	}
	return int64(minor), nil
}

// SinceBoot returns the time since this machine started, suspensions included. It is
// the same for all processes and never goes back.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		// Linux has had this clock since 2.6.39, so there is nothing to handle.
		return 0
	}
	return time.Duration(t.Nano())
}

// BootID returns the kernel's random ID of this boot.
func (r Roots) BootID() (string, error) {
	path := filepath.Join(r.Complete().Proc, "sys/kernel/random/boot_id")
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	id := strings.TrimSpace(string(data))
	if id == "" {
		return "", fmt.Errorf("boot id: %s is empty", path)
	}
	return id, nil
}
