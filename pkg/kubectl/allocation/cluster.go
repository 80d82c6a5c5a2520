// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package allocation asks the scheduler's own allocator what it would allocate to claims on the
// nodes of a fleet.Snapshot, and what it would allocate if something were different: a claim
// changed, other claims gone, a taint removed.
//
// A Planner is made of a Snapshot once and is never changed; Without returns another one, for other
// circumstances. A Cluster is what there is, in use or not. All methods may be called concurrently.
//
// Fleets are large and their nodes alike: nodes on which the allocator would see the same are searched once, unless the claims could tell
// their devices apart.
package allocation

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// compiledSelectors is how many CEL expressions are kept.
const compiledSelectors = 500

// Cluster is what there is to allocate, in use or not: nodes, pools of devices, and classes. It is never changed.
type Cluster struct {
	// Features are what the allocator is assumed to support, and Assumptions say in sentences what was assumed, for people.
	Features    structured.Features
	Assumptions []string
	// Nodes are those of the Snapshot. Where nodes cannot be read, they are those that slices name, without anything but the name.
	Nodes []*corev1.Node
	// unread are nodes of which no more than the name is known, and most is "at most " where not all pods could be read.
	unread  sets.Set[string]
	most    string
	classes classes
	// extended finds the class that provides an extended resource: the newest that names it, or the one that the resource is named after.
	extended *extendedresourcecache.ExtendedResourceCache
	cel      *cel.Cache
	// pools are all there are, onNode those with slices of a node only, and anywhere those
	// with slices that are not.
	pools    map[poolID]*Pool
	onNode   map[string][]poolID
	anywhere []poolID
	// known is what selectors are for devices of one content.
	mu    sync.Mutex
	known map[question]answer
}

type question struct {
	expression string
	content    uint64
}

type answer struct {
	matches bool
	err     error
}

func newCluster(s *fleet.Snapshot) *Cluster {
	c := &Cluster{
		classes: classes{}, extended: extendedresourcecache.NewExtendedResourceCache(klog.Background()),
		onNode: map[string][]poolID{}, known: map[question]answer{},
	}
	for _, class := range s.Classes {
		c.classes[class.Name] = class
		c.extended.OnAdd(class, true)
	}
	c.Features, c.Assumptions = featuresOf(s)
	c.Nodes, c.unread = nodesOf(s)
	if s.Hides(fleet.ResourcePods) {
		c.most = "at most "
	}
	c.cel = cel.NewCache(compiledSelectors, cel.Features{
		EnableConsumableCapacity: c.Features.ConsumableCapacity, EnableListTypeAttributes: c.Features.ListTypeAttributes,
	})
	c.pools = poolsOf(s)
	for id, pool := range c.pools {
		for _, s := range pool.all {
			if node := ptr.Deref(s.Spec.NodeName, ""); node != "" {
				c.onNode[node] = append(c.onNode[node], id)
			} else {
				c.anywhere = append(c.anywhere, id)
			}
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

// Published is a device in its slice and pool.
type Published struct {
	*Pool
	Device  *resourceapi.Device
	content uint64
}

// Devices goes through those that are there for a node: all of a slice, none, or those whose own node selection has it.
func (c *Cluster) Devices(node *corev1.Node) iter.Seq[Published] {
	return func(yield func(Published) bool) {
		for _, id := range c.poolsOn(node.Name) {
			pool := c.pools[id]
			for _, s := range pool.Slices {
				each := ptr.Deref(s.Spec.PerDeviceNodeSelection, false)
				if !each && !c.matches(node, s.Spec.NodeName, s.Spec.AllNodes, s.Spec.NodeSelector) {
					continue
				}
				for i := range s.Spec.Devices {
					if d := &s.Spec.Devices[i]; each && !c.matches(node, d.NodeName, d.AllNodes, d.NodeSelector) {
						continue
					} else if !yield(Published{pool, d, pool.contents[s][i]}) {
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

// Selects says what the allocator finds for an expression and a device.
func (c *Cluster) Selects(ctx context.Context, expression string, p Published) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := question{expression, p.content}
	if a, known := c.known[q]; known && !seesIdentities(expression) {
		return a.matches, a.err
	}
	compiled := c.cel.GetOrCompile(expression)
	if compiled.Error != nil {
		return false, compiled.Error
	}
	d := p.Device
	matches, _, err := compiled.DeviceMatches(ctx, cel.Device{Driver: p.Driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity})
	if ctx.Err() == nil {
		c.known[q] = answer{matches, err}
	}
	return matches, err
}

// Attribute returns an attribute by its fully qualified name. A name in a slice without domain
// is in the driver's.
func (p Published) Attribute(name string) (resourceapi.DeviceAttribute, bool) {
	a, has := p.Device.Attributes[resourceapi.QualifiedName(name)]
	if id := fleet.Unqualified(name); !has && name == p.Driver+"/"+id {
		a, has = p.Device.Attributes[resourceapi.QualifiedName(id)]
	}
	return a, has
}

// nodesOf returns the nodes of a Snapshot. Without the right to read nodes there are those that
// slices name; otherwise the slices of other nodes are left over from nodes that are gone.
func nodesOf(s *fleet.Snapshot) (nodes []*corev1.Node, unread sets.Set[string]) {
	unread = sets.New[string]()
	if !s.Lacks(fleet.ResourceNodes, "") {
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

// DefaultFeatures are those that Kubernetes 1.37 has on unless they are turned off.
var DefaultFeatures = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	PartitionableDevices: true, PrioritizedList: true,
}

// featuresOf returns what the scheduler of a cluster supports, and what of that is assumed. The
// API server drops fields whose feature gate is off: a field that is set is evidence.
func featuresOf(s *fleet.Snapshot) (structured.Features, []string) {
	f, seen := DefaultFeatures, structured.Features{}
	for _, slice := range s.Slices {
		seen.PartitionableDevices = seen.PartitionableDevices || len(slice.Spec.SharedCounters) > 0
		seen.OptionalNodeOperations = seen.OptionalNodeOperations || len(slice.Spec.SkipNodeOperations) > 0
		for i := range slice.Spec.Devices {
			seeDevice(&seen, &slice.Spec.Devices[i])
		}
	}
	f.CompatibilityGroups = seen.CompatibilityGroups
	f.FractionalCapacityRange = seen.FractionalCapacityRange
	f.ListTypeAttributes = seen.ListTypeAttributes
	f.OptionalNodeOperations = seen.OptionalNodeOperations
	assumed := sets.List(DefaultFeatures.Set().Difference(seen.Set()))
	if len(assumed) == 0 {
		return f, nil
	}
	return f, []string{fmt.Sprintf("The scheduler is assumed to have what Kubernetes 1.37 has on by default: nothing in the cluster shows whether %s is.", strings.Join(assumed, ", "))}
}

func seeDevice(seen *structured.Features, d *resourceapi.Device) {
	seen.ConsumableCapacity = seen.ConsumableCapacity || d.AllowMultipleAllocations != nil
	seen.DeviceTaints = seen.DeviceTaints || len(d.Taints) > 0
	for _, c := range d.ConsumesCounters {
		seen.CompatibilityGroups = seen.CompatibilityGroups || len(c.CompatibilityGroups) > 0
	}
	for _, a := range d.Attributes {
		seen.ListTypeAttributes = seen.ListTypeAttributes || a.IntValues != nil || a.BoolValues != nil || a.StringValues != nil || a.VersionValues != nil
	}
	for _, c := range d.Capacity {
		r := ptr.Deref(ptr.Deref(c.RequestPolicy, resourceapi.CapacityRequestPolicy{}).ValidRange, resourceapi.CapacityRequestPolicyRange{})
		for _, q := range []*resource.Quantity{r.Min, r.Max, r.Step} {
			if q != nil {
				_, whole := q.AsInt64()
				seen.FractionalCapacityRange = seen.FractionalCapacityRange || !whole
			}
		}
	}
}
