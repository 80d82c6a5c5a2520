// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"math"
	"time"

	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Measured is what the driver's pods told at a time.
type Measured struct {
	At   time.Time
	Told *scrape.Result
}

// Usage is what the driver measured. What is not known is missing, and no zero.
type Usage struct {
	// Memory is used of Of, in bytes.
	Memory *int64 `json:"memory,omitempty"`
	Of     int64  `json:"of,omitempty"`
	// Busy is how busy the multiprocessors are, in percent.
	Busy *int `json:"busy,omitempty"`
	// Idle is since when nothing has run, to the minute: what is as it was is not sent again.
	Idle *time.Time `json:"idle,omitempty"`
	// Unknown says why nothing is known.
	Unknown string `json:"unknown,omitempty"`
}

// usages finds what was measured. Where nothing was, it knows nothing, and says nothing.
type usages struct {
	Measured
	// gpus are by node and PCI address.
	gpus map[[2]string]scrape.GPU
}

func newUsages(m Measured) usages {
	u := usages{m, map[[2]string]scrape.GPU{}}
	for _, g := range ptr.Deref(m.Told, scrape.Result{}).GPUs {
		u.gpus[[2]string{g.Node, g.PCIBusID}] = g
	}
	return u
}

// of returns what a claim uses of a device.
func (u usages) of(h *fleet.Holding) *Usage {
	if u.Told == nil {
		return nil
	}
	told, why := u.Told.Of(h)
	if told == nil {
		return &Usage{Unknown: why}
	}
	out := usageOf(told.UsedBytes, told.Utilization)
	switch d := h.Device; {
	case told.LimitBytes != nil:
		out.Of = *told.LimitBytes
	case d != nil && d.Shared() && d.Profile == "":
		out.Of = d.GPU.MemoryBytes
	case d != nil:
		out.Of = d.Capacity(fleet.CapacityMemory)
	}
	// What worked at the last look is not idle.
	if told.Idle != nil && *told.Idle >= time.Minute {
		out.Idle = new(u.At.Add(-*told.Idle).UTC().Truncate(time.Minute))
	}
	return out
}

// ofGPU returns what is used of a GPU as a whole.
func (u usages) ofGPU(g *fleet.GPU) *Usage {
	told, has := u.gpus[[2]string{g.Node.Name, g.PCIBusID}]
	if !has {
		return nil
	}
	out := usageOf(told.UsedBytes, told.Utilization)
	out.Of = ptr.Deref(told.MemoryBytes, g.MemoryBytes)
	return out
}

// usageOf rounds to mebibytes, so that what has hardly changed is not sent again.
func usageOf(bytes *int64, ratio *float64) *Usage {
	out := &Usage{}
	if bytes != nil {
		out.Memory = new(*bytes >> 20 << 20)
	}
	if ratio != nil {
		out.Busy = new(int(math.Round(100 * *ratio)))
	}
	return out
}
