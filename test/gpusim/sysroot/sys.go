// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// sys writes the GPUs as the PCI bus shows them, below a bridge of their root
// complex, and the NUMA nodes.
func sys(t *tree, m *machine.Machine) {
	t.file("sys/module/nvidia/version", lines(m.DriverVersion))
	t.file("sys/module/nvidia/initstate", lines("live"))
	nodes := 1
	for i := range m.GPUs {
		g, device := &m.GPUs[i], devicePath(m, i)
		for name, value := range map[string]string{
			"vendor":           hex(g.PCIDeviceID & 0xffff),
			"device":           hex(g.PCIDeviceID >> 16),
			"subsystem_vendor": hex(g.PCISubsystem & 0xffff),
			"subsystem_device": hex(g.PCISubsystem >> 16),
			"class":            "0x030200", // 3D controller
			"numa_node":        fmt.Sprint(g.NUMANode),
		} {
			t.file("sys/"+device+"/"+name, lines(value))
		}
		t.link("sys/bus/pci/devices/"+g.PCIAddress, "../../../"+device)
		nodes = max(nodes, g.NUMANode+1)
	}
	numa(t, nodes)
}

// devicePath is the folder below sys of a GPU, which is behind a bridge of its own.
func devicePath(m *machine.Machine, i int) string {
	g, below := &m.GPUs[i], 1
	for _, other := range m.GPUs[:i] {
		if other.PCIeRoot == g.PCIeRoot {
			below++
		}
	}
	bridge := fmt.Sprintf("%s:%02x.0", strings.TrimPrefix(g.PCIeRoot, "pci"), below)
	return "devices/" + g.PCIeRoot + "/" + bridge + "/" + g.PCIAddress
}

// SetPCIDriver makes the PCI bus of a root show a GPU with this driver of the kernel, or not
// at all where driver is empty. NVML goes on as before.
func SetPCIDriver(root string, m *machine.Machine, gpu int, driver string) error {
	address, device := m.GPUs[gpu].PCIAddress, devicePath(m, gpu)
	onBus := filepath.Join(root, "sys/bus/pci/devices", address)
	bound := filepath.Join(root, "sys", device, "driver")
	for _, link := range []string{onBus, bound} {
		if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("PCI device %s: %w", address, err)
		}
	}
	if driver == "" {
		return nil
	}
	err := errors.Join(os.Symlink("../../../bus/pci/drivers/"+driver, bound), os.Symlink("../../../"+device, onBus))
	if err != nil {
		return fmt.Errorf("PCI device %s: %w", address, err)
	}
	return nil
}

func hex(id uint32) string { return fmt.Sprintf("0x%04x", id) }

// cpusPerNode is a made-up size; only which socket a CPU is on matters.
const cpusPerNode = 16

// numa writes the distances between NUMA nodes on a machine with two sockets:
// near within a socket, far across.
func numa(t *tree, nodes int) {
	perSocket := (nodes + 1) / 2
	for n := range nodes {
		distances := make([]string, nodes)
		for to := range distances {
			switch {
			case to == n:
				distances[to] = "10"
			case to/perSocket == n/perSocket:
				distances[to] = "12"
			default:
				distances[to] = "32"
			}
		}
		dir := fmt.Sprintf("sys/devices/system/node/node%d/", n)
		t.file(dir+"distance", lines(strings.Join(distances, " ")))
		first := n * cpusPerNode
		t.file(dir+"cpulist", lines(fmt.Sprintf("%d-%d", first, first+cpusPerNode-1)))
		t.file(fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/physical_package_id", first), lines(fmt.Sprint(n/perSocket)))
	}
}
