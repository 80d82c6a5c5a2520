// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import "github.com/partage-dev/partage/test/gpusim/machine"

// place fills in where a GPU is on the PCI bus, and what its NVLinks lead to.
func (e *encoder) place(c *C.struct_gs_gpu, g *machine.GPU) {
	e.text(c.pcie_root[:], "PCIe root", g.PCIeRoot)
	e.text(c.pcie_switch[:], "PCIe switch", g.PCIeSwitch)
	e.text(c.cluster_uuid[:], "UUID of the NVLink cluster", g.Clique.ClusterUUID)
	c.clique_id = e.natural("NVLink clique", g.Clique.ID)
	if !e.fits("NVLinks", len(g.NVLinks), C.GS_MAX_NVLINKS) {
		return
	}
	c.nvlink_count = C.int32_t(len(g.NVLinks))
	for i, link := range g.NVLinks {
		e.text(c.nvlinks[i].remote[:], "remote end of an NVLink", link.Remote)
		c.nvlinks[i].remote_type = e.natural("type of an NVLink's remote end", link.RemoteType)
		c.nvlinks[i].down = flag(link.Down)
	}
}

func decodeNVLinks(c *C.struct_gs_gpu) []machine.NVLink {
	var links []machine.NVLink
	for i := range int(c.nvlink_count) {
		link := &c.nvlinks[i]
		links = append(links, machine.NVLink{Remote: C.GoString(&link.remote[0]), RemoteType: int(link.remote_type), Down: link.down != 0})
	}
	return links
}

func (e *encoder) nics(c *C.struct_gs_machine, nics []machine.NIC) {
	if !e.fits("network cards", len(nics), C.GS_MAX_NICS) {
		return
	}
	c.nic_count = C.int32_t(len(nics))
	for i := range nics {
		e.text(c.nics[i].pci_address[:], "PCI address", nics[i].PCIAddress)
		e.text(c.nics[i].pcie_root[:], "PCIe root", nics[i].PCIeRoot)
		e.text(c.nics[i].pcie_switch[:], "PCIe switch", nics[i].PCIeSwitch)
		c.nics[i].pci_device_id = C.uint32_t(nics[i].PCIDeviceID)
		c.nics[i].numa_node = e.number("NUMA node", nics[i].NUMANode)
	}
}

func decodeNICs(c *C.struct_gs_machine) []machine.NIC {
	var nics []machine.NIC
	for i := range int(c.nic_count) {
		nic := &c.nics[i]
		nics = append(nics, machine.NIC{
			PCIAddress: C.GoString(&nic.pci_address[0]), PCIDeviceID: uint32(nic.pci_device_id),
			PCIeRoot: C.GoString(&nic.pcie_root[0]), PCIeSwitch: C.GoString(&nic.pcie_switch[0]), NUMANode: int(nic.numa_node),
		})
	}
	return nics
}
