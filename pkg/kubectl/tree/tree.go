// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package tree shows what every GPU is used for: from the node to the pods, with a strip of the
// GPU's memory slices, its health, and what still fits.
package tree

import (
	"cmp"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// Tree is what the command prints.
type Tree struct {
	metav1.TypeMeta `json:",inline"`

	Driver string `json:"driver"`
	Nodes  []Node `json:"nodes"`
	// Unpublished are devices that claims have and that no slice has any more.
	Unpublished []Device `json:"unpublished,omitempty"`

	// of is how many nodes there were to choose from.
	of int
}

// Node is one with devices of the driver.
type Node struct {
	Name string `json:"name"`
	// Problems are what keeps pods from the node, such as that it is not ready.
	Problems []string `json:"problems,omitempty"`
	GPUs     []GPU    `json:"gpus"`
}

// GPU is one of a node.
type GPU struct {
	// Label is what people call it.
	Label       string `json:"label"`
	Name        string `json:"name"`
	UUID        string `json:"uuid,omitempty"`
	ProductName string `json:"productName,omitempty"`
	PCIBusID    string `json:"pciBusID,omitempty"`
	MemoryBytes int64  `json:"memoryBytes,omitempty"`
	// Cells are the GPU's memory slices, as far as they have a counter of their own. A GPU that
	// cannot be partitioned is one cell.
	Cells  []Cell        `json:"cells"`
	Taints []fleet.Taint `json:"taints,omitempty"`
	// Devices are those that claims have.
	Devices []Device   `json:"devices,omitempty"`
	Free    fleet.Room `json:"free"`
}

// Cell states.
const (
	// CellFree: a claim can be allocated it.
	CellFree = "free"
	// CellTaken: a claim has it.
	CellTaken = "taken"
	// CellShared: it belongs to a device that claims share.
	CellShared = "shared"
	// CellUnknown: a claim that cannot be read may have it.
	CellUnknown = "unknown"
	// CellBlocked: nobody has it, and taints keep it from being allocated.
	CellBlocked = "blocked"
)

// Cell is a memory slice, with those that follow it and have no counter.
type Cell struct {
	Slice int    `json:"slice"`
	State string `json:"state"`
	// Mark is that of the claim.
	Mark string `json:"mark,omitempty"`
}

// Device is one that claims have.
type Device struct {
	Pool      string `json:"pool"`
	Name      string `json:"name"`
	Type      string `json:"type,omitempty"`
	Profile   string `json:"profile,omitempty"`
	Placement []int  `json:"placement,omitempty"`
	// Shares is how many claims can have it at once, 0 if one has it alone.
	Shares int `json:"shares,omitempty"`
	// AtLeast says that others may share it whose claims could not be read.
	AtLeast bool    `json:"atLeast,omitempty"`
	Claims  []Claim `json:"claims"`
}

// Claim is one that has a device.
type Claim struct {
	// Mark is the letter of the claim.
	Mark        string `json:"mark,omitempty"`
	Namespace   string `json:"namespace"`
	Name        string `json:"name"`
	AdminAccess bool   `json:"adminAccess,omitempty"`
	// MemoryBytes and SMPercent are what the scheduler counts for a share.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	SMPercent   int64 `json:"smPercent,omitempty"`
	// UUID is that of the live device, as the driver reports it.
	UUID string `json:"uuid,omitempty"`
	// NotReady is the reason that the driver gives, and its message.
	NotReady string `json:"notReady,omitempty"`
	Pods     []Pod  `json:"pods,omitempty"`
}

// Pod is one that a claim is reserved for.
type Pod struct {
	Name string `json:"name"`
	// Owner is what it belongs to, such as "Deployment web".
	Owner string `json:"owner,omitempty"`
	// Phase is "" where the pod could not be read.
	Phase string `json:"phase"`
}

// mostNames is how many of the nodes an error names.
const mostNames = 10

// New makes the tree of some nodes, or of all if no names are given, as far as they have the labels.
func New(m *fleet.Model, only []string, selector labels.Selector) (*Tree, error) {
	t := &Tree{TypeMeta: printer.TypeMeta("Tree"), Driver: m.Driver, Nodes: []Node{}, of: len(m.Nodes)}
	var names []string
	for _, n := range m.Nodes {
		names = append(names, n.Name)
	}
	for _, name := range only {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("node %s has no devices of driver %s; nodes with some: %s", name, m.Driver, cmp.Or(printer.Some(names, mostNames), "none"))
		}
	}
	marks := marks{}
	for _, n := range m.Nodes {
		if len(only) > 0 && !slices.Contains(only, n.Name) || !selected(n, selector) {
			continue
		}
		node := Node{Name: n.Name, Problems: n.Problems(), GPUs: []GPU{}}
		for _, g := range n.GPUs {
			node.GPUs = append(node.GPUs, newGPU(g, marks))
		}
		t.Nodes = append(t.Nodes, node)
	}
	if len(only) == 0 && selector.Empty() {
		for _, h := range m.Holdings {
			if h.Device == nil {
				t.Unpublished = append(t.Unpublished, Device{Pool: h.Result.Pool, Name: h.Result.Device, Claims: []Claim{newClaim(h, "")}})
			}
		}
	}
	return t, nil
}

// selected reports whether the node's labels match. Nothing is known of a node without object.
func selected(n *fleet.Node, s labels.Selector) bool {
	return s.Empty() || n.Object != nil && s.Matches(labels.Set(n.Object.Labels))
}

func newGPU(g *fleet.GPU, marks marks) GPU {
	out := GPU{
		Label: g.Label(),
		Name:  g.Name, UUID: g.UUID, ProductName: g.ProductName, PCIBusID: g.PCIBusID, MemoryBytes: g.MemoryBytes,
		Taints: g.Taints(), Free: fleet.Free(g),
	}
	for _, d := range g.Devices {
		if len(d.Holdings) == 0 {
			continue
		}
		device := Device{Pool: d.Pool, Name: d.Name, Type: d.Type, Profile: d.Profile, Placement: d.Placement}
		if d.Shared() {
			device.Shares = int(d.Capacity(fleet.CapacityShares))
			device.AtLeast = g.Node.AtLeast && len(d.Held()) < device.Shares
		}
		for _, h := range d.Holdings {
			device.Claims = append(device.Claims, newClaim(h, marks.of(h.Claim)))
		}
		out.Devices = append(out.Devices, device)
	}
	slices.SortStableFunc(out.Devices, func(a, b Device) int { return slices.Compare(a.Placement, b.Placement) })
	out.Cells = cells(g, marks)
	return out
}

// marks are letters of claims, in the order in which they come.
type marks map[*resourceapi.ResourceClaim]string

const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

func (m marks) of(c *resourceapi.ResourceClaim) string {
	if m[c] == "" {
		m[c] = string(letters[len(m)%len(letters)])
	}
	return m[c]
}

func newClaim(h *fleet.Holding, mark string) Claim {
	memory, percent := h.Result.ConsumedCapacity[fleet.CapacityMemory], h.Result.ConsumedCapacity[fleet.CapacitySMPercent]
	c := Claim{
		Mark: mark, Namespace: h.Claim.Namespace, Name: h.Claim.Name, AdminAccess: h.Admin(), MemoryBytes: memory.Value(), SMPercent: percent.Value(),
	}
	if live := h.Live(); live != nil {
		c.UUID = live.UUID
	}
	if not := h.NotReady(); not != nil {
		c.NotReady = not.Reason + ": " + not.Message
	}
	for _, u := range h.Users() {
		pod := Pod{Name: u.Name, Owner: u.Owner()}
		if u.Pod != nil {
			pod.Phase = string(u.Pod.Status.Phase)
		}
		c.Pods = append(c.Pods, pod)
	}
	return c
}

// cells says who has each slice: every device that is not a partition has all of them.
func cells(g *fleet.GPU, marks marks) (out []Cell) {
	indexes := g.Cells
	if len(indexes) == 0 {
		indexes = []int{0}
	}
	for _, index := range indexes {
		state, held := StateOf(g, index)
		c := Cell{Slice: index, State: state}
		if state == CellTaken {
			c.Mark = marks.of(held.Held()[0].Claim)
		}
		out = append(out, c)
	}
	return out
}

// StateOf returns the state of a slice, and the device that claims have of it, if they have one.
func StateOf(g *fleet.GPU, index int) (state string, held *fleet.Device) {
	state = CellBlocked
	for _, d := range g.Devices {
		switch isHeld := len(d.Held()) > 0; {
		case !Uses(d, index):
		case isHeld && d.Shared():
			return CellShared, d
		case isHeld:
			return CellTaken, d
		case d.Tainted():
		case g.Node.Hidden:
			state = CellUnknown
		default:
			state = CellFree
		}
	}
	return state, nil
}

// Uses reports whether a device takes a memory slice of its GPU from others.
func Uses(d *fleet.Device, index int) bool {
	return d.Type != fleet.TypeObserver && (len(d.Placement) == 0 || slices.Contains(d.Placement, index))
}
