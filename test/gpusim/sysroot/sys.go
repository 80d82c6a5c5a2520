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

// endpoint is a device on the PCI bus.
type endpoint struct {
	address, root, upstream string // upstream: the port of its switch, or ""
	class                   string
	id, subsystem           uint32 // (device << 16) | vendor
	numa                    int
}

// endpoints are the machine's GPUs, and after them its network cards.
func endpoints(m *machine.Machine) []endpoint {
	var all []endpoint
	for i := range m.GPUs {
		g := &m.GPUs[i]
		all = append(all, endpoint{
			address: g.PCIAddress, root: g.PCIeRoot, upstream: g.PCIeSwitch, class: "0x030200", // 3D controller
			id: g.PCIDeviceID, subsystem: g.PCISubsystem, numa: g.NUMANode,
		})
	}
	for _, n := range m.NICs {
		all = append(all, endpoint{
			address: n.PCIAddress, root: n.PCIeRoot, upstream: n.PCIeSwitch, class: "0x020000", // Ethernet controller
			id: n.PCIDeviceID, subsystem: n.PCIDeviceID, numa: n.NUMANode,
		})
	}
	return all
}

// sys writes what is on the PCI bus, below the root complexes, and the NUMA nodes.
func sys(t *tree, m *machine.Machine) {
	t.file("sys/module/nvidia/version", lines(m.DriverVersion))
	t.file("sys/module/nvidia/initstate", lines("live"))
	nodes := 1
	paths := devicePaths(m)
	for _, e := range endpoints(m) {
		device := paths[e.address]
		for name, value := range map[string]string{
			"vendor":           hex(e.id & 0xffff),
			"device":           hex(e.id >> 16),
			"subsystem_vendor": hex(e.subsystem & 0xffff),
			"subsystem_device": hex(e.subsystem >> 16),
			"class":            e.class,
			"numa_node":        fmt.Sprint(e.numa),
		} {
			t.file("sys/"+device+"/"+name, lines(value))
		}
		t.link("sys/bus/pci/devices/"+e.address, "../../../"+device)
		nodes = max(nodes, e.numa+1)
	}
	numa(t, nodes)
}

// devicePaths are the folders below sys of all devices, by address: each behind a root port of its
// own, or behind a downstream port of its switch, which has a root port.
func devicePaths(m *machine.Machine) map[string]string {
	paths := map[string]string{}
	ports := map[string]int{} // by what they are on: a root complex or a switch
	next := func(on, bus string) string {
		ports[on]++
		return fmt.Sprintf("%s:%02x.0", bus, ports[on])
	}
	for _, e := range endpoints(m) {
		above := "devices/" + e.root
		rootBus := strings.TrimPrefix(e.root, "pci")
		switch {
		case e.upstream == "":
			above += "/" + next(e.root, rootBus)
		case paths[e.upstream] == "":
			paths[e.upstream] = above + "/" + next(e.root, rootBus) + "/" + e.upstream
			fallthrough
		default:
			above = paths[e.upstream] + "/" + next(e.upstream, busBelow(e.upstream))
		}
		paths[e.address] = above + "/" + e.address
	}
	return paths
}

// busBelow is the bus of a switch's downstream ports: "0000:18" for "0000:17:00.0".
func busBelow(upstream string) string {
	var domain, bus int
	if _, err := fmt.Sscanf(upstream, "%x:%x:", &domain, &bus); err != nil {
		return upstream // the machine's own mistake shows in the tree
	}
	return fmt.Sprintf("%04x:%02x", domain, bus+1)
}

// SetPCIDriver makes the PCI bus of a root show a GPU with this driver of the kernel, or not
// at all where driver is empty. NVML goes on as before.
func SetPCIDriver(root string, m *machine.Machine, gpu int, driver string) error {
	address := m.GPUs[gpu].PCIAddress
	device := devicePaths(m)[address]
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
