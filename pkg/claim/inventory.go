// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"sync/atomic"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// inventory has the devices of this node, once they are known.
type inventory struct {
	atomic.Pointer[device.Inventory]
}

// addresses are the PCI addresses of all GPUs.
func (i *inventory) addresses() []string {
	if known := i.Load(); known != nil {
		return known.PCIAddresses()
	}
	return nil
}

func (i *inventory) gpu(pciAddress string) *gpu.GPU {
	if known := i.Load(); known != nil {
		return known.GPU(pciAddress)
	}
	return nil
}

// uuid is that of a GPU, or nothing while it is not known.
func (i *inventory) uuid(pciAddress string) string {
	if g := i.gpu(pciAddress); g != nil {
		return g.UUID
	}
	return ""
}

// slices is how many compute slices a profile of a GPU has, or 0 while that is not known.
func (i *inventory) slices(pciAddress string, profileID uint32) int {
	g := i.gpu(pciAddress)
	if g == nil || g.MIG == nil {
		return 0
	}
	for k := range g.MIG.Profiles {
		if p := &g.MIG.Profiles[k]; p.ID == profileID {
			return p.Slices
		}
	}
	return 0
}
