// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"embed"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Source says how well a value is known.
type Source string

// See the package's documentation for what each means.
const (
	Measured   Source = "measured"
	Documented Source = "documented"
	Assumed    Source = "assumed"
)

// Tags is a section's provenance.
type Tags struct {
	Source Source            `json:"source"`
	Except map[string]Source `json:"except,omitempty"`
}

// Of is the source of one value of the section, by its key in the file.
func (t Tags) Of(key string) Source {
	if s, ok := t.Except[key]; ok {
		return s
	}
	return t.Source
}

// Board is one entry of the catalogue.
type Board struct {
	Name    string    `json:"name"`
	Product Product   `json:"product"`
	MPS     MPS       `json:"mps"`
	MIG     *BoardMIG `json:"mig,omitempty"`
}

// Product is what the undivided board says of itself.
type Product struct {
	Tags
	Name              string `json:"name"`
	Brand             string `json:"brand"`
	Architecture      string `json:"architecture"`
	ComputeCapability string `json:"computeCapability"` // "9.0"
	PCIDevice         string `json:"pciDevice"`         // hexadecimal device:vendor
	PCISubsystem      string `json:"pciSubsystem"`
	MemoryMiB         uint64 `json:"memoryMiB"`   // what NVML reports as total
	ReservedMiB       uint64 `json:"reservedMiB"` // of it, held by the driver
	SMs               int    `json:"sms"`
	CoresPerSM        int    `json:"coresPerSM"`
	AddressingMode    string `json:"addressingMode"` // none, hmm, ats or unreported
	ECC               string `json:"ecc"`            // enabled, disabled or unsupported
}

// MPS is what programs take of the board's memory beside what they allocate.
type MPS struct {
	Tags
	ServerMiB     uint64 `json:"serverMiB"`     // an MPS server, of each device
	ContextMiB    uint64 `json:"contextMiB"`    // a CUDA context, of the undivided board
	MIGContextMiB uint64 `json:"migContextMiB"` // a CUDA context, of a MIG device
}

// BoardMIG is the partitioning side of a board.
type BoardMIG struct {
	Tags
	MemorySlices  int  `json:"memorySlices"`
	ResetToSwitch bool `json:"resetToSwitch"`
	// ReservedMiBPerSlice is what the driver holds of an instance's memory, for each of its compute slices.
	ReservedMiBPerSlice uint64    `json:"reservedMiBPerSlice"`
	Profiles            []Profile `json:"profiles"`
}

// Profile is a GPU instance profile; the order in the file is the one of
// nvidia-smi mig -lgip.
type Profile struct {
	Tags
	Name        string     `json:"name"`
	Kind        string     `json:"kind"` // NVML_GPU_INSTANCE_PROFILE_<Kind>
	ID          uint32     `json:"id"`
	Slices      int        `json:"slices"`
	Max         int        `json:"max"`
	SMs         int        `json:"sms"`
	MemoryMiB   uint64     `json:"memoryMiB"`
	Engines     Engines    `json:"engines"`
	Placements  Placements `json:"placements"`
	InstanceIDs []int      `json:"instanceIDs"`
	Compute     Compute    `json:"compute"`
}

// Engines counts the engines of a GPU instance.
type Engines struct {
	Copy   int `json:"copy"`
	Decode int `json:"decode"`
	Encode int `json:"encode"`
	JPEG   int `json:"jpeg"`
	OFA    int `json:"ofa"`
}

// Placements are the memory slices at which a profile may start.
type Placements struct {
	Size   int   `json:"size"`
	Starts []int `json:"starts"`
}

// Compute holds the compute instance profiles of a GPU instance.
type Compute struct {
	Tags
	Profiles []ComputeProfile `json:"profiles"`
}

// ComputeProfile is a compute instance profile.
type ComputeProfile struct {
	Kind   string `json:"kind"` // NVML_COMPUTE_INSTANCE_PROFILE_<Kind>
	ID     uint32 `json:"id"`
	Slices int    `json:"slices"`
	Max    int    `json:"max"`
	SMs    int    `json:"sms"`
}

//go:embed boards/*.yaml
var files embed.FS

// Boards is the names of all boards, sorted.
func Boards() []string {
	entries, err := files.ReadDir("boards")
	if err != nil {
		return nil // the directory is part of the binary
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// Load reads one board. The error of an unknown name lists the known ones.
func Load(name string) (*Board, error) {
	data, err := files.ReadFile(path.Join("boards", name+".yaml"))
	if err != nil {
		return nil, fmt.Errorf("unknown board %q (known: %s)", name, strings.Join(Boards(), ", "))
	}
	return decode(name, data)
}

func decode(name string, data []byte) (*Board, error) {
	var b Board
	if err := yaml.UnmarshalStrict(data, &b); err != nil {
		return nil, fmt.Errorf("board %s: %w", name, err)
	}
	if b.Name != name {
		return nil, fmt.Errorf("board %s: its file says %q", name, b.Name)
	}
	return &b, nil
}

// Sources counts the board's values by how well they are known.
func (b *Board) Sources() map[Source]int {
	n := map[Source]int{}
	count := func(t Tags, values int) {
		for _, s := range t.Except {
			n[s]++
		}
		n[t.Source] += values - len(t.Except)
	}
	count(b.Product.Tags, valuesOf(b.Product))
	if b.MIG == nil {
		count(b.MPS.Tags, valuesOf(b.MPS)-1) // one is about MIG devices
	} else {
		count(b.MPS.Tags, valuesOf(b.MPS))
		count(b.MIG.Tags, valuesOf(*b.MIG)-1) // the profiles count themselves
		for _, p := range b.MIG.Profiles {
			count(p.Tags, valuesOf(p)-1) // the same holds for compute
			count(p.Compute.Tags, len(p.Compute.Profiles))
		}
	}
	return n
}

// valuesOf is the number of a section's own values.
func valuesOf(section any) int { return reflect.TypeOf(section).NumField() - 1 }
