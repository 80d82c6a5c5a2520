// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"crypto/sha256"
	_ "embed" // machines.yaml
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Options are what a machine can be varied by.
type Options struct {
	// Seed changes UUIDs, serial numbers and the boot id; the same seed gives
	// the same machine.
	Seed uint64
	// DriverVersion defaults to 580.95.05, CUDADriverVersion to 13000 (13.0).
	DriverVersion     string
	CUDADriverVersion int
}

const (
	defaultDriver = "580.95.05"
	defaultCUDA   = 13000

	// maxGPUs is what the shared state has room for.
	maxGPUs = 16
)

// Described is a machine's name with one line about it.
type Described struct {
	Name        string `json:"name"`
	Description string `json:"description"`
}

// machineFile is one entry of machines.yaml.
type machineFile struct {
	Described
	GPUs   []slot  `json:"gpus"`
	NICs   []nic   `json:"nics"`
	NVLink *nvlink `json:"nvlink"`
}

// slot is a place for a board.
type slot struct {
	Board   string `json:"board"`
	Address string `json:"address"`
	Root    string `json:"root"`
	Switch  string `json:"switch"` // the upstream port of its PCIe switch, if there is one
	NUMA    int    `json:"numa"`
	Minor   int    `json:"minor"`
	// MIG is the MIG mode, for boards on which an administrator sets it.
	MIG bool `json:"mig"`
}

//go:embed machines.yaml
var machinesYAML []byte

func machines() ([]machineFile, error) {
	var list []machineFile
	if err := yaml.UnmarshalStrict(machinesYAML, &list); err != nil {
		return nil, fmt.Errorf("machines.yaml: %w", err)
	}
	return list, nil
}

// Machines lists the named machines. Besides them every <board>x<count> is one,
// for example l4x8; a100, h100 and gh200 stand for the usual variants.
func Machines() ([]Described, error) {
	list, err := machines()
	if err != nil {
		return nil, err
	}
	var out []Described
	for _, m := range list {
		out = append(out, m.Described)
	}
	return out, nil
}

// Machine makes a machine by name: one of Machines, or <board>x<count> with 1
// to 16 GPUs. GPUs are ordered by PCI address, which is NVML's order. MIG mode
// is off where machines.yaml does not turn it on.
func Machine(name string, o Options) (*machine.Machine, error) {
	plan, err := planOf(name)
	if err != nil {
		return nil, err
	}
	id := identity{machine: name, seed: o.Seed}
	m := &machine.Machine{
		Name:              name,
		DriverVersion:     o.DriverVersion,
		CUDADriverVersion: o.CUDADriverVersion,
		BootID:            id.uuid("boot", 0),
	}
	if m.DriverVersion == "" {
		m.DriverVersion = defaultDriver
	}
	if m.CUDADriverVersion == 0 {
		m.CUDADriverVersion = defaultCUDA
	}
	m.NVMLVersion = fmt.Sprintf("%d.%s", m.CUDADriverVersion/1000, m.DriverVersion)
	for i, s := range plan.GPUs {
		b, err := Load(s.Board)
		if err != nil {
			return nil, err
		}
		g, err := b.GPU()
		if err != nil {
			return nil, err
		}
		g.UUID = "GPU-" + id.uuid("gpu", i)
		g.Serial = id.serial(i)
		g.Minor, g.PCIAddress, g.PCIeRoot, g.PCIeSwitch, g.NUMANode = s.Minor, s.Address, s.Root, s.Switch, s.NUMA
		if s.MIG {
			if g.MIG == nil || !g.MIG.ResetToSwitch {
				return nil, fmt.Errorf("machine %q: MIG mode of board %s is not for an administrator to set", name, s.Board)
			}
			g.MIG.Current, g.MIG.Pending = true, true
		}
		m.GPUs = append(m.GPUs, *g)
	}
	if plan.NVLink != nil {
		plan.NVLink.connect(m.GPUs)
	}
	w := &words{board: name}
	for _, n := range plan.NICs {
		m.NICs = append(m.NICs, n.card(w))
	}
	return m, w.err
}

var boardTimes = regexp.MustCompile(`^(.+)x([0-9]+)$`)

func planOf(name string) (*machineFile, error) {
	list, err := machines()
	if err != nil {
		return nil, err
	}
	names := []string{"<board>x<count>"}
	for _, m := range list {
		if m.Name == name {
			return &m, nil
		}
		names = append(names, m.Name)
	}
	match := boardTimes.FindStringSubmatch(name)
	if match == nil {
		return nil, fmt.Errorf("unknown machine %q (known: %s)", name, strings.Join(names, ", "))
	}
	n, err := strconv.Atoi(match[2])
	if err != nil || n < 1 || n > maxGPUs {
		return nil, fmt.Errorf("machine %q: a machine has 1 to %d GPUs", name, maxGPUs)
	}
	board := boards.FullName(match[1])
	if _, err := Load(board); err != nil {
		return nil, fmt.Errorf("machine %q: %w", name, err)
	}
	return &machineFile{GPUs: spread(board, n)}, nil
}

// spread puts n boards on two sockets, two boards to a PCIe root.
func spread(board string, n int) []slot {
	var out []slot
	for i := range n {
		pair := i / 2
		bus := 0x10 + pair*0x0c // eight pairs stay below bus 0x70
		out = append(out, slot{
			Board:   board,
			Address: fmt.Sprintf("0000:%02x:00.0", bus+1+i%2*5),
			Root:    fmt.Sprintf("pci0000:%02x", bus),
			NUMA:    i * 2 / max(n, 2),
			Minor:   i,
		})
	}
	return out
}

// identity derives names that differ between machines and seeds.
type identity struct {
	machine string
	seed    uint64
}

func (id identity) hash(what string, i int) [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%s/%d/%s/%d", id.machine, id.seed, what, i))
}

func (id identity) uuid(what string, i int) string {
	h := id.hash(what, i)
	h[6] = h[6]&0x0f | 0x40 // version 4, the random kind
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// serial is 13 digits, as on real boards.
func (id identity) serial(i int) string {
	h := id.hash("serial", i)
	return fmt.Sprintf("165%010d", binary.BigEndian.Uint64(h[:8])%10_000_000_000)
}

// NewBootID is the boot id that follows another, for a simulated reboot.
func NewBootID(previous string) string {
	return identity{machine: previous}.uuid("boot", 1)
}
