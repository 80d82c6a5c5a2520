// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// ShortAddress is a PCI address without what the addresses of all GPUs have in common.
func ShortAddress(address string) string {
	return strings.TrimSuffix(strings.TrimPrefix(address, "0000:"), ".0")
}

// Label is what people call the GPU of a node: its place there, and its short address.
func (g *GPU) Label() string {
	if g.PCIBusID == "" {
		return fmt.Sprintf("GPU %d", g.Index)
	}
	return fmt.Sprintf("GPU %d (%s)", g.Index, ShortAddress(g.PCIBusID))
}

// Path names the GPU to commands, such as node-1/1b:00.
func (g *GPU) Path() string {
	return g.Node.Name + "/" + cmp.Or(ShortAddress(g.PCIBusID), strconv.Itoa(g.Index))
}

// GPU finds the one that people name: NODE/ and its place there, its PCI address, short or not, or its name.
func (m *Model) GPU(path string) (*GPU, error) {
	name, of, _ := strings.Cut(path, "/")
	at := slices.IndexFunc(m.Nodes, func(n *Node) bool { return n.Name == name })
	if at < 0 {
		return nil, fmt.Errorf("%s: node %q has no devices of driver %s; kubectl gpu tree shows those that have", path, name, m.Driver)
	}
	of = strings.ToLower(of)
	var labels []string
	for _, g := range m.Nodes[at].GPUs {
		if of != "" && slices.Contains([]string{strconv.Itoa(g.Index), g.PCIBusID, ShortAddress(g.PCIBusID), g.Name}, of) {
			return g, nil
		}
		labels = append(labels, g.Path())
	}
	return nil, fmt.Errorf("%s: node %s has no such GPU; it has %s", path, name, strings.Join(labels, ", "))
}

// Taint is one of some of a GPU's devices.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
	// Devices is how many have it, of all but observers.
	Devices int `json:"devices"`
	Of      int `json:"of"`
}

// Taints returns those of the GPU's devices, each once.
func (g *GPU) Taints() []Taint {
	var out []Taint
	of := 0
	for _, d := range g.Devices {
		// An observer is tainted so that nobody has it without admin access.
		if d.Type == TypeObserver {
			continue
		}
		of++
		for _, t := range d.Taints {
			i := slices.IndexFunc(out, func(o Taint) bool { return o.Key == t.Key && o.Value == t.Value && o.Effect == string(t.Effect) })
			if i < 0 {
				i, out = len(out), append(out, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
			}
			out[i].Devices++
		}
	}
	for i := range out {
		out[i].Of = of
	}
	return out
}

// Cordoned is the problem of a node that an administrator has cordoned.
const Cordoned = "cordoned"

// Problems returns what keeps pods from a node.
func (n *Node) Problems() []string {
	var out []string
	if n.Incomplete {
		out = append(out, "ResourceSlices are missing: nothing can be allocated")
	}
	if n.Object == nil {
		return out
	}
	if n.Object.Spec.Unschedulable {
		out = append(out, Cordoned)
	}
	for _, c := range n.Object.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			out = append(out, strings.TrimSuffix("not ready: "+c.Reason, ": "))
		}
	}
	return out
}

// OutOfUse reports whether no claim can have anything of the GPU that it does not have already: the driver has tainted all of it, or its node
// takes no pods. What people taint is for those who tolerate it.
func (g *GPU) OutOfUse(driver string) bool {
	return len(g.Node.Problems()) > 0 || !slices.ContainsFunc(g.Devices, func(d *Device) bool {
		return d.Type != TypeObserver && !slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Effect != resourceapi.DeviceTaintEffectNone && strings.HasPrefix(t.Key, driver+"/")
		})
	})
}
