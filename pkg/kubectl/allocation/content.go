// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"fmt"
	"hash/maphash"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// seed of all hashes. They live as long as the process.
var seed = maphash.MakeSeed()

// identities are attributes that tell devices of one kind apart.
var identities = sets.New("uuid", "parentUUID", "pciBusID", "pcieRoot", "serial", "minor", "index", "numaNode", "nvlinkDomain", "pcieSwitch")

// contentOf stands for what a device of a driver has, apart from its name, the names of its counter sets and its identities: these differ
// between nodes that are otherwise alike.
func contentOf(driver string, d *resourceapi.Device) uint64 {
	c := *d
	c.Name, c.ConsumesCounters, c.Taints = "", slices.Clone(d.ConsumesCounters), slices.Clone(d.Taints)
	for i := range c.ConsumesCounters {
		c.ConsumesCounters[i].CounterSet = ""
	}
	for i := range c.Taints {
		c.Taints[i].TimeAdded = nil
	}
	c.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for name, a := range d.Attributes {
		if !identities.Has(fleet.Unqualified(string(name))) {
			c.Attributes[name] = a
		}
	}
	return hashOf(driver, &c)
}

// hashOf is that of a part of the API and its name.
func hashOf(name string, part interface{ Marshal() ([]byte, error) }) uint64 {
	data, err := part.Marshal()
	if err != nil {
		data = []byte(err.Error()) // all of its types can be encoded
	}
	var h maphash.Hash
	h.SetSeed(seed)
	h.WriteString(name)
	h.WriteByte(0)
	h.Write(data)
	return h.Sum64()
}

// writtenOut matches the use of an attribute whose name is written out, and the parenthesis of a function that is called in place of one.
var writtenOut = regexp.MustCompile(`device\.attributes\[\??('[^']*'|"[^"]*")\]\.\??(\w+)(\s*\()?`)

// seesIdentities reports whether the identities of a device may decide what an expression is: it names one, or looks at attributes in a way
// that does not say which.
func seesIdentities(expression string) bool {
	for _, use := range writtenOut.FindAllStringSubmatch(expression, -1) {
		if identities.Has(use[2]) || use[3] != "" {
			return true
		}
	}
	return strings.Contains(writtenOut.ReplaceAllString(expression, ""), "attributes")
}

// tellApart reports whether selectors of claims may treat devices differently that are of one kind.
func (c *Cluster) tellApart(claims []*resourceapi.ResourceClaim) bool {
	sees := func(s resourceapi.DeviceSelector) bool { return s.CEL == nil || seesIdentities(s.CEL.Expression) }
	return slices.ContainsFunc(claims, func(claim *resourceapi.ResourceClaim) bool {
		return slices.ContainsFunc(fleet.AsksOf(&claim.Spec.Devices), func(a fleet.Ask) bool {
			class := c.classes[*a.Class]
			return class != nil && slices.ContainsFunc(class.Spec.Selectors, sees) || slices.ContainsFunc(*a.Selectors, sees)
		})
	})
}

// comparedBy returns the attributes by which constraints of claims compare devices.
func comparedBy(claims []*resourceapi.ResourceClaim) []string {
	var names []string
	for _, claim := range claims {
		for i := range claim.Spec.Devices.Constraints {
			names = append(names, fleet.Compared(&claim.Spec.Devices.Constraints[i]))
		}
	}
	return names
}

// key is equal for nodes that have the same devices, used in the same way, of which the same ones are alike in what is compared.
func (p *Planner) key(node *corev1.Node, compared []string) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	write := func(all ...any) { fmt.Fprintln(&h, all...) }
	// Which devices have the same value counts, not the value.
	values := map[string]int{}
	for _, id := range p.Cluster.poolsOn(node.Name) {
		pool := p.Cluster.pools[id]
		if len(pool.all) > len(pool.Slices) || pool.Incomplete() || pool.Invalid {
			write(id.pool) // which the allocator names
		}
		sets := map[string]int{}
		for _, s := range pool.all {
			for _, set := range s.Spec.SharedCounters {
				sets[set.Name] = len(sets)
			}
		}
		for _, s := range pool.all {
			write(id.driver, s.Spec.Pool.ResourceSliceCount, s.Spec.Pool.Generation-pool.Slices[0].Spec.Pool.Generation)
			p.Cluster.writeNode(write, s, node)
			for _, set := range s.Spec.SharedCounters {
				write(sets[set.Name], hashOf("", &resourceapi.CounterSet{Counters: set.Counters}))
			}
			for i := range s.Spec.Devices {
				d := Published{pool, &s.Spec.Devices[i], pool.contents[s][i]}
				write(d.content)
				write(p.usedOf(d))
				for _, c := range d.Device.ConsumesCounters {
					write(sets[c.CounterSet])
				}
				for _, name := range compared {
					a, has := d.Attribute(name)
					value := fmt.Sprint(name, a.String())
					if _, known := values[value]; !known {
						values[value] = len(values)
					}
					write(has, values[value])
					if p.Cluster.Features.ListTypeAttributes {
						write(value) // Lists are compared by what they have in common, with single values, too.
					}
				}
			}
		}
	}
	return h.Sum64()
}

// usedOf returns how many claims have a device or a part of it, how many of them have it alone, and what stands for the parts.
func (p *Planner) usedOf(d Published) (claims, alone int, consumed uint64) {
	held := p.Held(d.Pool, d.Device.Name)
	for _, hold := range held {
		if hold.Alone() {
			alone++
		}
		for name, q := range hold.Result.ConsumedCapacity {
			consumed += hashOf(string(name), &q)
		}
	}
	return len(held), alone, consumed
}

// writeNode tells nodes apart that a slice treats differently.
func (c *Cluster) writeNode(write func(...any), s *resourceapi.ResourceSlice, node *corev1.Node) {
	matches, err := structured.NodeMatches(c.Features, node, ptr.Deref(s.Spec.NodeName, ""), ptr.Deref(s.Spec.AllNodes, false), s.Spec.NodeSelector)
	if err != nil || ptr.Deref(s.Spec.PerDeviceNodeSelection, false) {
		write(node.Name)
	}
	if write(matches); s.Spec.NodeName == nil {
		write(s.Spec.Pool.Name) // which is the same on all nodes
	}
}
