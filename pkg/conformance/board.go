// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// Board is what is known of a GPU model, in the form of the simulator's catalogue
// (test/gpusim/catalog/boards). Values that were not measured are left out.
type Board struct {
	Name    string    `json:"name" yaml:"name"`
	Product Product   `json:"product" yaml:"product"`
	MPS     *BoardMPS `json:"mps,omitempty" yaml:"mps,omitempty"`
	MIG     *BoardMIG `json:"mig,omitempty" yaml:"mig,omitempty"`
}

// Tags say how well the values of a section are known: "measured", "documented" or "assumed".
type Tags struct {
	Source string            `json:"source,omitempty" yaml:"source,omitempty"`
	Except map[string]string `json:"except,omitempty" yaml:"except,omitempty"`
}

// Product is the undivided board.
type Product struct {
	Tags              `yaml:",inline"`
	Name              string  `json:"name" yaml:"name"`
	Architecture      string  `json:"architecture,omitempty" yaml:"architecture,omitempty"`
	ComputeCapability string  `json:"computeCapability,omitempty" yaml:"computeCapability,omitempty"`
	PCIDevice         string  `json:"pciDevice,omitempty" yaml:"pciDevice,omitempty"`
	MemoryMiB         uint64  `json:"memoryMiB,omitempty" yaml:"memoryMiB,omitempty"`
	ReservedMiB       *uint64 `json:"reservedMiB,omitempty" yaml:"reservedMiB,omitempty"`
	SMs               int     `json:"sms,omitempty" yaml:"sms,omitempty"`
	// CoresPerSM cannot be measured.
	CoresPerSM     int    `json:"coresPerSM,omitempty" yaml:"coresPerSM,omitempty"`
	AddressingMode string `json:"addressingMode,omitempty" yaml:"addressingMode,omitempty"`
	ECC            string `json:"ecc,omitempty" yaml:"ecc,omitempty"`
}

// BoardMPS is what programs take of the board's memory beside what they allocate.
type BoardMPS struct {
	Source string `json:"source,omitempty" yaml:"source,omitempty"`
	// ServerMiB is what an MPS server has.
	ServerMiB *uint64 `json:"serverMiB,omitempty" yaml:"serverMiB,omitempty"`
	// ContextMiB is what a CUDA context takes on the undivided board, and MIGContextMiB on
	// a partition.
	ContextMiB    *uint64 `json:"contextMiB,omitempty" yaml:"contextMiB,omitempty"`
	MIGContextMiB *uint64 `json:"migContextMiB,omitempty" yaml:"migContextMiB,omitempty"`
}

// BoardMIG is how the board can be partitioned.
type BoardMIG struct {
	Tags          `yaml:",inline"`
	MemorySlices  int       `json:"memorySlices" yaml:"memorySlices"`
	ResetToSwitch bool      `json:"resetToSwitch" yaml:"resetToSwitch"`
	Profiles      []Profile `json:"profiles" yaml:"profiles"`
}

// Profile is a GPU instance profile.
type Profile struct {
	Name      string `json:"name" yaml:"name"`
	Tags      `yaml:",inline"`
	ID        uint32 `json:"id" yaml:"id"`
	Slices    int    `json:"slices" yaml:"slices"`
	Max       int    `json:"max" yaml:"max"`
	SMs       int    `json:"sms" yaml:"sms"`
	MemoryMiB uint64 `json:"memoryMiB" yaml:"memoryMiB"`
	// Engines are counted by kind.
	Engines    map[string]int `json:"engines" yaml:"engines,flow"`
	Placements Placements     `json:"placements" yaml:"placements,flow"`
	// InstanceIDs are those of the GPU instances, in the order of the placements.
	InstanceIDs []int `json:"instanceIDs,omitempty" yaml:"instanceIDs,omitempty,flow"`
}

// Placements are the memory slices at which a profile may start.
type Placements struct {
	Size   int   `json:"size" yaml:"size"`
	Starts []int `json:"starts" yaml:"starts"`
}

const (
	mib      = 1 << 20
	measured = "measured"
)

// measure returns the board of a GPU, with all that was read of it. known is what the catalogue has of it, or nil.
func measure(g *gpu.GPU, facts nvml.Facts, known *Board) Board {
	p := Product{
		Tags: Tags{Source: measured}, Name: g.ProductName,
		Architecture:      strings.ToLower(strings.Fields(g.Architecture + " ?")[0]),
		ComputeCapability: fmt.Sprintf("%d.%d", g.ComputeCapability.Major, g.ComputeCapability.Minor),
		MemoryMiB:         g.Resources.MemoryBytes / mib,
		AddressingMode:    strings.ToLower(g.AddressingMode),
		ECC:               "unsupported",
	}
	if vendor, device, ok := strings.Cut(g.PCIDeviceID, ":"); ok { // the other way round, as the catalogue has it
		p.PCIDevice = device + ":" + vendor
	}
	if facts.ECC != nil {
		p.ECC = map[bool]string{true: "enabled", false: "disabled"}[*facts.ECC]
	}
	// While MIG is on it is what the instances reserve.
	if facts.ReservedBytes != nil && !inMIG(g) {
		p.ReservedMiB = new(*facts.ReservedBytes / mib)
	}
	// NVML has the number of cores only: that of multiprocessors is what a partition can have.
	if facts.Cores != nil && known != nil && known.Product.CoresPerSM > 0 {
		p.SMs = *facts.Cores / known.Product.CoresPerSM
	}
	b := Board{Product: p, MIG: measureMIG(g.MIG)}
	if known != nil {
		b.Name = known.Name
		return b
	}
	b.Name = strings.Join(strings.FieldsFunc(strings.ToLower(g.ProductName), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}), "-")
	return b
}

// measureMIG returns how a GPU can be partitioned, nil where it cannot.
func measureMIG(m *gpu.MIG) *BoardMIG {
	if m == nil {
		return nil
	}
	out := &BoardMIG{Tags: Tags{Source: measured}, MemorySlices: m.MemorySlices, ResetToSwitch: !m.Dynamic}
	for _, p := range m.Profiles {
		r := p.Resources
		profile := Profile{
			Tags: Tags{Source: measured}, Name: p.Name, ID: p.ID, Slices: p.Slices, Max: p.MaxInstances,
			SMs: r.Multiprocessors, MemoryMiB: r.MemoryBytes / mib,
			Engines: map[string]int{"copy": r.CopyEngines, "decode": r.Decoders, "encode": r.Encoders, "jpeg": r.JPEGEngines, "ofa": r.OFAEngines},
		}
		for _, at := range p.Placements {
			profile.Placements.Size = at.Size
			profile.Placements.Starts = append(profile.Placements.Starts, at.Start)
		}
		slices.Sort(profile.Placements.Starts)
		out.Profiles = append(out.Profiles, profile)
	}
	return out
}
