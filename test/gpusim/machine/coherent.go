// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"strconv"
	"strings"
)

// CoherentMemory says who manages the memory of GPUs that are coherent with the CPU.
type CoherentMemory int

// Values of CoherentMemory. By default it is the driver from R615 on, and the kernel before.
const (
	CoherentDefault CoherentMemory = iota
	CoherentNUMA
	CoherentDriver
)

// CoherentModes are the words for the values.
var CoherentModes = []string{"", "numa", "driver"}

func (c CoherentMemory) String() string { return CoherentModes[c] }

// driverByDefault is the first driver that manages coherent memory without being told to.
const driverByDefault = 615

// Coherent reports whether the GPU is coherent with the CPU.
func (g *GPU) Coherent() bool {
	const ats = 2
	return g.AddressingMode == ats
}

// DriverManagesMemory reports whether the driver manages coherent memory, so that the kernel has
// no NUMA nodes of it. As in the driver, a mode that is set counts on any machine, and the
// default where a GPU is coherent.
func (m *Machine) DriverManagesMemory() bool {
	if m.CoherentMemory != CoherentDefault {
		return m.CoherentMemory == CoherentDriver
	}
	release, _, _ := strings.Cut(m.DriverVersion, ".")
	major, err := strconv.Atoi(release)
	if err != nil || major < driverByDefault {
		return false
	}
	for i := range m.GPUs {
		if m.GPUs[i].Coherent() {
			return true
		}
	}
	return false
}
