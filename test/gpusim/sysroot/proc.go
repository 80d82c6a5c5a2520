// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"fmt"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Minor numbers of capabilities, and how many the driver has room for: the
// table of minors covers GPU minors 0 to 31, GPU instances 0 to 14 and compute
// instances 0 to 7.
const (
	capConfig  = 1
	capMonitor = 2
	capFirst   = 3

	capGPUs      = 32
	capInstances = 15
	capComputes  = 8
)

const (
	procDir     = home + "/proc/"
	devicesFile = procDir + "devices"
	bootIDFile  = procDir + "sys/kernel/random/boot_id"
)

// proc writes what the NVIDIA driver and the kernel show in /proc.
func proc(t *tree, m *machine.Machine, n majors) {
	t.file(devicesFile, procDevices(n))
	t.file(bootIDFile, lines(m.BootID))
	t.file(procDir+"driver/nvidia/version", lines(
		"NVRM version: NVIDIA UNIX Open Kernel Module for "+strings.SplitN(triplet(), "-", 2)[0]+"  "+m.DriverVersion+"  Release Build  (gpusim)",
		"GCC version:  none, this driver is simulated"))
	t.file(procDir+"driver/nvidia/params", params(m))
	t.file(procDir+"driver/nvidia-caps/mig-minors", migMinors())
	informations(t, m)
	t.file(procDir+"driver/nvidia/capabilities/mig/config", capability(capConfig, 0o400))
	t.file(procDir+"driver/nvidia/capabilities/mig/monitor", capability(capMonitor, 0o444))
	capabilities(t, m)
}

// params are some of the module's parameters, as it has them by now: who manages the memory of
// coherent GPUs is an older parameter, which the newer one sets.
func params(m *machine.Machine) string {
	numa := 1
	if m.DriverManagesMemory() {
		numa = 0
	}
	return lines("ModifyDeviceFiles: 1", "DeviceFileUID: 0", "DeviceFileGID: 0", "DeviceFileMode: 438",
		fmt.Sprintf("EnableUserNUMAManagement: %d", numa),
		fmt.Sprintf("CoherentGPUMemoryMode: %q", m.CoherentMemory.String()))
}

// procDevices lists the majors. Names and layout are the kernel's.
func procDevices(n majors) string {
	return lines("Character devices:",
		"  1 mem", "  5 /dev/tty", " 10 misc",
		fmt.Sprintf("%3d nvidia", nvidiaMajor),
		fmt.Sprintf("%3d nvidia-modeset", nvidiaMajor),
		fmt.Sprintf("%3d nvidiactl", nvidiaMajor),
		fmt.Sprintf("%3d nvidia-caps", n.caps),
		fmt.Sprintf("%3d nvidia-uvm", n.uvm),
		"", "Block devices:", "259 blkext")
}

// migMinors is the table of capability minors. It is complete from the start,
// whatever instances exist: minor = 3 + 135 x GPU + 9 x GI, and one more plus
// the CI for a compute instance.
func migMinors() string {
	var b strings.Builder
	fmt.Fprintf(&b, "config %d\nmonitor %d\n", capConfig, capMonitor)
	for gpu := range capGPUs {
		for gi := range capInstances {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", gpu, gi, instanceMinor(gpu, gi))
			for ci := range capComputes {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", gpu, gi, ci, computeMinor(gpu, gi, ci))
			}
		}
	}
	return b.String()
}

func instanceMinor(gpuMinor, gi int) int {
	return capFirst + (gpuMinor*capInstances+gi)*(capComputes+1)
}

func computeMinor(gpuMinor, gi, ci int) int { return instanceMinor(gpuMinor, gi) + 1 + ci }

// capabilities writes the files of the instances that exist. The simulated
// library does the same when it creates or destroys one.
func capabilities(t *tree, m *machine.Machine) {
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if g.MIG == nil {
			continue
		}
		for _, gi := range g.MIG.Instances {
			dir := fmt.Sprintf("%sdriver/nvidia/capabilities/gpu%d/mig/gi%d/", procDir, g.Minor, gi.ID)
			t.file(dir+"access", capability(instanceMinor(g.Minor, gi.ID), 0o444))
			for _, ci := range gi.Compute {
				t.file(fmt.Sprintf("%sci%d/access", dir, ci.ID), capability(computeMinor(g.Minor, gi.ID, ci.ID), 0o444))
			}
		}
	}
}

func capability(minor, mode int) string {
	return lines(fmt.Sprintf("DeviceFileMinor: %d", minor), fmt.Sprintf("DeviceFileMode: %d", mode), "DeviceFileModify: 1")
}

// informations writes the driver's file about each GPU.
func informations(t *tree, m *machine.Machine) {
	for i := range m.GPUs {
		g := &m.GPUs[i]
		t.file(procDir+"driver/nvidia/gpus/"+g.PCIAddress+"/information", information(g, m.DriverVersion))
	}
}

func information(g *machine.GPU, driver string) string {
	return lines(
		"Model: \t\t "+g.ProductName,
		"IRQ:   \t\t 18",
		"GPU UUID: \t "+g.UUID,
		"Video BIOS: \t 00.00.00.00.00",
		"Bus Type: \t PCIe",
		"DMA Size: \t 52 bits",
		"DMA Mask: \t 0xfffffffffffff",
		"Bus Location: \t "+g.PCIAddress,
		fmt.Sprintf("Device Minor: \t %d", g.Minor),
		"GPU Firmware: \t "+driver,
		"GPU Excluded:\t No")
}
