// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import "github.com/partage-dev/partage/test/gpusim/machine"

// nic is a network card.
type nic struct {
	Device  string `json:"device"` // hexadecimal device:vendor
	Address string `json:"address"`
	Root    string `json:"root"`
	Switch  string `json:"switch"`
	NUMA    int    `json:"numa"`
}

func (n nic) card(w *words) machine.NIC {
	return machine.NIC{
		PCIAddress: n.Address, PCIDeviceID: w.pciID("device of a network card", n.Device),
		PCIeRoot: n.Root, PCIeSwitch: n.Switch, NUMANode: n.NUMA,
	}
}

// nvlink says what the NVLinks of a machine lead to.
type nvlink struct {
	// Links is how many every GPU has. Those that lead nowhere are down.
	Links int `json:"links"`
	// Switches are the NVSwitches, with the links that each has to every GPU. NVML does not tell
	// the address of one without.
	Switches []struct {
		Address string `json:"address"`
		Links   int    `json:"links"`
	} `json:"switches"`
	// Bridged is how many links lead to the other GPU of a pair: the first and the second GPU, the
	// third and the fourth…
	Bridged int `json:"bridged"`
	// Fabric is there where GPUs register with a fabric.
	Fabric *struct {
		Cluster string `json:"cluster"` // UUID; none where the fabric ends with the machine
		Clique  int    `json:"clique"`
	} `json:"fabric"`
}

// Constants of nvml.h.
const (
	remoteGPU       = 0
	remoteSwitch    = 2
	remoteUnknown   = 0xff
	fabricCompleted = 3
)

func (n *nvlink) connect(gpus []machine.GPU) {
	for i := range gpus {
		g := &gpus[i]
		for _, s := range n.Switches {
			for range s.Links {
				g.NVLinks = append(g.NVLinks, machine.NVLink{Remote: s.Address, RemoteType: remoteSwitch})
			}
		}
		for range n.Bridged {
			g.NVLinks = append(g.NVLinks, machine.NVLink{Remote: gpus[i^1].PCIAddress, RemoteType: remoteGPU})
		}
		for len(g.NVLinks) < n.Links {
			g.NVLinks = append(g.NVLinks, machine.NVLink{RemoteType: remoteUnknown, Down: true})
		}
		if n.Fabric != nil {
			g.Health.Fabric.State = fabricCompleted
			g.Clique = machine.Clique{ClusterUUID: n.Fabric.Cluster, ID: n.Fabric.Clique}
		}
	}
}
