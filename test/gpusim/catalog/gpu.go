// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"fmt"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Constants of nvml.h, by the words that the board files use.
var (
	brands          = map[string]int{"tesla": 2, "nvidia-rtx": 13, "nvidia": 14}
	architectures   = map[string]int{"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
	addressingModes = map[string]int{"none": 0, "hmm": 1, "ats": 2, "unreported": -1}
	eccModes        = map[string]int{"disabled": 0, "enabled": 1, "unsupported": -1}

	gpuInstanceKinds = map[string]int{
		"1_SLICE": 0, "2_SLICE": 1, "3_SLICE": 2, "4_SLICE": 3, "7_SLICE": 4, "8_SLICE": 5, "6_SLICE": 6,
		"1_SLICE_REV1": 7, "2_SLICE_REV1": 8, "1_SLICE_REV2": 9,
		"1_SLICE_GFX": 10, "2_SLICE_GFX": 11, "4_SLICE_GFX": 12,
		"1_SLICE_NO_ME": 13, "2_SLICE_NO_ME": 14, "1_SLICE_ALL_ME": 15, "2_SLICE_ALL_ME": 16, "3_SLICE_GFX": 17,
	}
	computeInstanceKinds = map[string]int{
		"1_SLICE": 0, "2_SLICE": 1, "3_SLICE": 2, "4_SLICE": 3, "7_SLICE": 4, "8_SLICE": 5, "6_SLICE": 6,
		"1_SLICE_REV1": 7, "7_SLICE_NVL": 8,
	}
)

const miB = 1 << 20

// idleTemperature and idlePower are about those of a GPU without work.
const (
	idleTemperature = 34
	idlePower       = 50_000 // mW
)

// GPU makes a GPU of this board, without identity (UUID, serial, minor, PCI
// address), with MIG mode off and in the default compute mode.
func (b *Board) GPU() (*machine.GPU, error) {
	p := b.Product
	w := &words{board: b.Name}
	g := &machine.GPU{
		Board:          b.Name,
		ProductName:    p.Name,
		Brand:          w.lookup("brand", p.Brand, brands),
		Architecture:   w.lookup("architecture", p.Architecture, architectures),
		AddressingMode: w.lookup("addressingMode", p.AddressingMode, addressingModes),
		ECC:            w.lookup("ecc", p.ECC, eccModes),
		PCIDeviceID:    w.pciID("pciDevice", p.PCIDevice),
		PCISubsystem:   w.pciID("pciSubsystem", p.PCISubsystem),
		MemoryBytes:    p.MemoryMiB * miB,
		ReservedBytes:  p.ReservedMiB * miB,
		ContextBytes:   b.MPS.ContextMiB * miB,
		MPSServerBytes: b.MPS.ServerMiB * miB,
		Cores:          p.SMs * p.CoresPerSM,
		NUMANode:       -1,
		Health:         machine.Health{Temperature: idleTemperature},
		Meters:         machine.Meters{PowerMilliwatts: idlePower},
	}
	if _, err := fmt.Sscanf(p.ComputeCapability, "%d.%d", &g.ComputeMajor, &g.ComputeMinor); err != nil {
		w.fail("computeCapability", p.ComputeCapability)
	}
	if b.MIG != nil {
		g.MIG = &machine.MIG{ResetToSwitch: b.MIG.ResetToSwitch, MemorySlices: b.MIG.MemorySlices, ContextBytes: b.MPS.MIGContextMiB * miB}
		for i := range b.MIG.Profiles {
			g.MIG.Profiles = append(g.MIG.Profiles, b.MIG.Profiles[i].gi(w, b.MIG.ReservedMiBPerSlice))
		}
	}
	if w.err != nil {
		return nil, w.err
	}
	return g, nil
}

func (p *Profile) gi(w *words, reservedPerSlice uint64) machine.GIProfile {
	out := machine.GIProfile{
		Enum: w.lookup(p.Name+".kind", p.Kind, gpuInstanceKinds), ID: p.ID, Name: p.Name,
		Slices: p.Slices, MaxInstances: p.Max, SMs: p.SMs,
		CopyEngines: p.Engines.Copy, Decoders: p.Engines.Decode, Encoders: p.Engines.Encode,
		JPEG: p.Engines.JPEG, OFA: p.Engines.OFA,
		MemoryMiB: p.MemoryMiB, ReservedMiB: reservedPerSlice * uint64(p.Slices), // #nosec G115 -- from 1 to 7
		InstanceIDs: p.InstanceIDs,
	}
	for _, start := range p.Placements.Starts {
		out.Placements = append(out.Placements, machine.Placement{Start: start, Size: p.Placements.Size})
	}
	for _, c := range p.Compute.Profiles {
		out.Compute = append(out.Compute, machine.CIProfile{
			Enum: w.lookup(p.Name+".compute.kind", c.Kind, computeInstanceKinds), ID: c.ID,
			Slices: c.Slices, MaxInstances: c.Max, SMs: c.SMs,
		})
	}
	return out
}

// words turns a board file's words into NVML's numbers and keeps the first
// one that it does not know.
type words struct {
	board string
	err   error
}

func (w *words) fail(key, value string) {
	if w.err == nil {
		w.err = fmt.Errorf("board %s: %s %q is not known", w.board, key, value)
	}
}

func (w *words) lookup(key, value string, table map[string]int) int {
	n, ok := table[value]
	if !ok {
		w.fail(key, value)
	}
	return n
}

// pciID packs "device:vendor" the way nvmlPciInfo_t does.
func (w *words) pciID(key, value string) uint32 {
	var device, vendor uint32
	if _, err := fmt.Sscanf(value, "%x:%x", &device, &vendor); err != nil || device > 0xffff || vendor > 0xffff {
		w.fail(key, value)
	}
	return device<<16 | vendor
}
