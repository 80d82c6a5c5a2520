// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// Supply is what a fleet offers to workloads.
type Supply struct {
	// Models are sorted by memory.
	Models []*Model
	// Cluster says that it was read from a cluster, not made of names of GPUs.
	Cluster bool
	// MissingClasses are those of the chart that the cluster does not have.
	MissingClasses []string
	// unseen says why the cluster's devices could not be read, "" if they could.
	unseen string
}

// Model is a model of GPU and what it is offered as. GPUs of a product that are offered
// differently, by the policies of their nodes or by MIG mode, are several.
type Model struct {
	Product, Architecture string
	// GPUs is their number.
	GPUs int
	// PerNode is how many of them each node has.
	PerNode  map[string]int
	Memory   int64
	PreVolta bool
	// Whole says that they are offered whole.
	Whole    bool
	Profiles []Profile
	// Shares are those of whole GPUs and of partitions.
	Shares []Share
}

// Share is a way in which a GPU, or each of its partitions of a profile, is shared.
type Share struct {
	// Type is mps or timeslice; Profile is "" for a whole GPU.
	Type, Profile string
	// Devices is how many partitions one GPU has room for, 1 for a whole GPU.
	Devices int
	// Clients is how many claims share one device.
	Clients int
	// Memory is what the claims on a device have together, Most is what one of them can have.
	Memory, Most int64
	// Limited says that memory is limited, and not only counted.
	Limited bool
	// Policy says that the sharing policy has to offer it first.
	Policy bool
}

// SupplyOf returns what the fleet of a cluster offers.
func SupplyOf(m *fleet.Model) *Supply {
	s := &Supply{Cluster: true}
	models := map[string]*Model{}
	for g := range m.GPUs() {
		one := newModel(g)
		key := fmt.Sprintf("%+v", one)
		if models[key] == nil {
			models[key], one.PerNode = one, map[string]int{}
			s.Models = append(s.Models, one)
		}
		models[key].GPUs++
		models[key].PerNode[g.Node.Name]++
	}
	s.sort()
	missing := map[string]string{}
	for _, one := range m.Missing {
		missing[one.Resource] = one.String()
	}
	s.unseen = missing[fleet.ResourceSlices]
	if missing[fleet.ResourceClasses] == "" {
		for _, name := range []string{manifest.ClassGPU, manifest.ClassMIG, manifest.ClassMPS, manifest.ClassTimeSlice} {
			if m.Class(name) == nil {
				s.MissingClasses = append(s.MissingClasses, name)
			}
		}
	}
	return s
}

// preVolta goes by the architecture's name.
func preVolta(g *fleet.GPU) bool {
	return slices.Contains([]string{"Kepler", "Maxwell", "Pascal"}, g.Architecture)
}

func (s *Supply) sort() {
	slices.SortFunc(s.Models, func(a, b *Model) int {
		return cmp.Or(cmp.Compare(a.Memory, b.Memory), cmp.Compare(a.Product, b.Product))
	})
}

// newModel returns what one GPU is offered as.
func newModel(g *fleet.GPU) *Model {
	m := &Model{Product: g.ProductName, Architecture: g.Architecture, Memory: g.MemoryBytes, PreVolta: preVolta(g)}
	alike := map[string][]*fleet.Device{}
	// What is tainted, such as a device that the policy has withdrawn, is for nobody new.
	offered := slices.DeleteFunc(slices.Clone(g.Devices), (*fleet.Device).Tainted)
	for _, d := range offered {
		alike[d.Type+d.Profile] = append(alike[d.Type+d.Profile], d)
	}
	for _, d := range offered {
		switch d.Type {
		case fleet.TypeGPU:
			m.Whole = true
		case fleet.TypeMIG:
			if !slices.ContainsFunc(m.Profiles, func(p Profile) bool { return p.Name == d.Profile }) {
				m.Profiles = append(m.Profiles, Profile{Name: d.Profile, Most: g.Most(alike[d.Type+d.Profile]), MemoryMiB: d.Capacity(fleet.CapacityMemory) / mib})
			}
		case fleet.TypeMPS, fleet.TypeTimeSlice:
			if !slices.ContainsFunc(m.Shares, func(s Share) bool { return s.Type == d.Type && s.Profile == d.Profile }) {
				memory := d.Published.Capacity[fleet.CapacityMemory]
				most := fleet.Largest(memory, memory.Value)
				m.Shares = append(m.Shares, Share{
					Type: d.Type, Profile: d.Profile, Devices: g.Most(alike[d.Type+d.Profile]), Clients: int(d.Capacity(fleet.CapacityShares)),
					Memory: memory.Value.Value(), Most: most.Value(), Limited: d.Isolation != Guarantees[TimeSlice].Attribute,
				})
			}
		}
	}
	return m
}

// builtinClients is how many claims share a device unless a policy says something else.
const builtinClients = 4

// SupplyOfNames returns what GPUs offer whose short names are given, such as h100 or t4=8, with
// the built-in policy and, where that is possible, shares of partitions.
func SupplyOfNames(names []string) (*Supply, error) {
	s := &Supply{}
	for _, name := range names {
		board, number, hasNumber := strings.Cut(name, "=")
		count := 1
		if hasNumber {
			if _, err := fmt.Sscanf(number+"\n", "%d\n", &count); err != nil || count < 1 {
				return nil, fmt.Errorf("--gpu %s: the number of GPUs must be 1 or more, as in %s=8", name, board)
			}
		}
		facts, err := boards.Load(strings.TrimSpace(board))
		if err != nil {
			return nil, fmt.Errorf("--gpu %s: %w", name, err)
		}
		s.Models = append(s.Models, modelOf(&facts.GPUs[0], count))
	}
	s.sort()
	return s, nil
}

// modelOf returns what the built-in policy offers of GPUs, and the shares of partitions that a policy could. MPS shares have what remains
// of the memory when the server and all clients' contexts have theirs.
func modelOf(g *gpu.GPU, count int) *Model {
	memory := int64(g.Resources.MemoryBytes)
	usable := memory - int64(g.ReservedMemory(nil))
	limited := usable - int64(gpu.MPSServerMemory+builtinClients*g.ContextMemory(nil))
	m := &Model{
		Product: g.ProductName, Architecture: g.Architecture, GPUs: count, PerNode: map[string]int{"": count}, Memory: memory, Whole: true,
		Shares: []Share{
			{Type: fleet.TypeMPS, Devices: 1, Clients: builtinClients, Memory: limited, Most: limited, Limited: true},
			{Type: fleet.TypeTimeSlice, Devices: 1, Clients: builtinClients, Memory: usable, Most: usable},
		},
	}
	if g.MIG == nil {
		return m
	}
	for _, p := range g.MIG.Profiles {
		// Variants, such as 1g.10gb+me, are nothing that a workload asks for.
		if strings.ContainsAny(p.Name, "+-") {
			continue
		}
		one := Profile{Name: p.Name, Most: p.MaxInstances, MemoryMiB: int64(p.Resources.MemoryBytes >> 20)}
		m.Profiles = append(m.Profiles, one)
		each := one.MemoryMiB*mib - int64(g.ReservedMemory(&gpu.Profile{Slices: one.Slices()}))
		m.Shares = append(m.Shares, Share{
			Type: fleet.TypeTimeSlice, Profile: p.Name, Devices: p.MaxInstances, Clients: builtinClients, Memory: each, Most: each, Policy: true,
		})
	}
	return m
}

// share returns the share of a type of a whole GPU, or of its partitions with enough memory,
// the smallest.
func (m *Model) share(kind string, ofPartitions bool, memory int64) *Share {
	var best *Share
	for i := range m.Shares {
		s := &m.Shares[i]
		if s.Type != kind || (s.Profile != "") != ofPartitions || s.Most < memory {
			continue
		}
		if best == nil || s.Most < best.Most {
			best = s
		}
	}
	return best
}

// claims returns how many claims with so much memory share one device.
func (s *Share) claims(memory int64) int {
	if memory <= 0 {
		return s.Clients
	}
	return min(s.Clients, int(s.Memory/memory))
}

// room returns how many claims with so much memory share one GPU.
func (s *Share) room(memory int64) int { return SharedCapacity(s.Devices, s.claims(memory)) }

// products returns the names of models, each once.
func products(models []*Model) []string {
	var names []string
	for _, m := range models {
		if !slices.Contains(names, m.Product) {
			names = append(names, m.Product)
		}
	}
	return names
}

// lacksClass reports whether the cluster is known not to have the class of a type of device.
func (s *Supply) lacksClass(name string) bool { return slices.Contains(s.MissingClasses, name) }
