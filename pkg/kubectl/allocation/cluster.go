// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// compiledSelectors is how many CEL expressions are kept.
const compiledSelectors = 500

// Cluster is what there is to allocate, whoever has it: nodes, pools of devices, and classes. It is never changed.
type Cluster struct {
	// Features are what the allocator is assumed to support, and Assumptions say in sentences what was assumed, for people.
	Features    structured.Features
	Assumptions []string
	// Nodes are those of the Snapshot. Where nodes cannot be read, they are those that slices name, without anything but the name.
	Nodes []*corev1.Node
	// unread are nodes of which no more than the name is known.
	unread  sets.Set[string]
	classes classes
	cel     *cel.Cache
	// pools are all there are, onNode those with slices of a node only, and anywhere those
	// with slices that are not.
	pools    map[poolID]*pool
	onNode   map[string][]poolID
	anywhere []poolID
}

func newCluster(s *fleet.Snapshot) *Cluster {
	c := &Cluster{classes: classesOf(s.Classes)}
	c.Features, c.Assumptions = featuresOf(s)
	c.Nodes, c.unread = nodesOf(s)
	c.cel = cel.NewCache(compiledSelectors, cel.Features{
		EnableConsumableCapacity: c.Features.ConsumableCapacity, EnableListTypeAttributes: c.Features.ListTypeAttributes,
	})
	c.pools, c.onNode = poolsOf(withTaintRules(s.Slices, s.TaintRules, c.Features)), map[string][]poolID{}
	for _, id := range slices.SortedFunc(maps.Keys(c.pools), comparePools) {
		for _, node := range c.pools[id].nodes {
			if node == "" {
				c.anywhere = append(c.anywhere, id)
				continue
			}
			c.onNode[node] = append(c.onNode[node], id)
		}
	}
	return c
}

// Unread reports whether no more than the name of a node is known: its labels, its taints and what
// it has may be anything.
func (c *Cluster) Unread(n *corev1.Node) bool { return c.unread.Has(n.Name) }

// Class returns a DeviceClass, or nil.
func (c *Cluster) Class(name string) *resourceapi.DeviceClass { return c.classes[name] }

// poolsOn returns the pools that have devices for a node, by driver and name.
func (c *Cluster) poolsOn(node string) []poolID {
	ids := slices.Concat(c.onNode[node], c.anywhere)
	slices.SortFunc(ids, comparePools)
	return slices.Compact(ids)
}

// Pools returns what a node sees of its pools.
func (c *Cluster) Pools(node string) []Pool {
	var out []Pool
	for _, id := range c.poolsOn(node) {
		out = append(out, c.pools[id].newest(id))
	}
	return out
}

// Published is a device in its slice and pool.
type Published struct {
	Pool  *Pool
	Slice *resourceapi.ResourceSlice
	Index int
}

// Device returns the device itself.
func (p Published) Device() *resourceapi.Device { return &p.Slice.Spec.Devices[p.Index] }

// Devices goes through those that are there for a node: all of a slice, none, or those whose own node selection has it.
func (c *Cluster) Devices(node *corev1.Node) iter.Seq[Published] {
	return func(yield func(Published) bool) {
		for _, pool := range c.Pools(node.Name) {
			for _, s := range pool.Slices {
				each := ptr.Deref(s.Spec.PerDeviceNodeSelection, false)
				if !each && !c.matches(node, s.Spec.NodeName, s.Spec.AllNodes, s.Spec.NodeSelector) {
					continue
				}
				for i := range s.Spec.Devices {
					if d := &s.Spec.Devices[i]; each && !c.matches(node, d.NodeName, d.AllNodes, d.NodeSelector) {
						continue
					}
					if !yield(Published{&pool, s, i}) {
						return
					}
				}
			}
		}
	}
}

// matches takes a selector that is invalid for one that has no node: saying so is the allocator's.
func (c *Cluster) matches(node *corev1.Node, name *string, all *bool, selector *corev1.NodeSelector) bool {
	matches, err := structured.NodeMatches(c.Features, node, ptr.Deref(name, ""), ptr.Deref(all, false), selector)
	return err == nil && matches
}

// evaluate says what the allocator finds for an expression and a device.
func (c *Cluster) evaluate(ctx context.Context, expression, driver string, d *resourceapi.Device) (bool, error) {
	compiled := c.cel.GetOrCompile(expression)
	if compiled.Error != nil {
		return false, compiled.Error
	}
	matches, _, err := compiled.DeviceMatches(ctx, cel.Device{Driver: driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity})
	return matches, err
}

// nodesOf returns the nodes of a Snapshot. Without the right to read nodes there are those that
// slices name; otherwise the slices of other nodes are left over from nodes that are gone.
func nodesOf(s *fleet.Snapshot) (nodes []*corev1.Node, unread sets.Set[string]) {
	unread = sets.New[string]()
	if !slices.ContainsFunc(s.Missing, func(m fleet.Missing) bool { return m.Resource == fleet.ResourceNodes }) {
		return slices.Clone(s.Nodes), unread
	}
	for _, slice := range s.Slices {
		if name := ptr.Deref(slice.Spec.NodeName, ""); name != "" && !unread.Has(name) {
			unread.Insert(name)
			nodes = append(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	return nodes, unread
}

// classes are what the allocator looks classes up in.
type classes map[string]*resourceapi.DeviceClass

func classesOf(list []*resourceapi.DeviceClass) classes {
	c := classes{}
	for _, class := range list {
		c[class.Name] = class
	}
	return c
}

// List returns all classes.
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(c)), nil
}

// Get returns one.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, has := c[name]; has {
		return class, nil
	}
	return nil, fmt.Errorf("read a class: %w", apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name))
}
