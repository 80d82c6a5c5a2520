// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// GPUUsageList is what kubectl gpu top gpus prints.
type GPUUsageList struct {
	metav1.TypeMeta `json:",inline"`

	Items []scrape.GPU `json:"items"`
}

// GPUs lists what the driver measured of GPUs.
func GPUs(r *scrape.Result) *GPUUsageList {
	return &GPUUsageList{TypeMeta: printer.TypeMeta("GPUUsageList"), Items: append([]scrape.GPU{}, r.GPUs...)}
}

// gpuOrders and nodeOrders are the values of --sort-by: what is most of it comes first.
var (
	gpuOrders = map[string]func(a, b scrape.GPU) int{
		"name":        func(_, _ scrape.GPU) int { return 0 },
		"memory":      func(a, b scrape.GPU) int { return most(a.UsedBytes, b.UsedBytes) },
		"busy":        func(a, b scrape.GPU) int { return most(a.Utilization, b.Utilization) },
		"temperature": func(a, b scrape.GPU) int { return most(a.Temperature, b.Temperature) },
	}
	nodeOrders = map[string]func(a, b NodeUsage) int{
		"name":      func(_, _ NodeUsage) int { return 0 },
		"memory":    func(a, b NodeUsage) int { return most(a.UsedBytes, b.UsedBytes) },
		"allocated": func(a, b NodeUsage) int { return most(a.AllocatedBytes, b.AllocatedBytes) },
	}
)

// Sort orders GPUs by a value of --sort-by, and by name among equals.
func (l *GPUUsageList) Sort(by string) {
	sortBy(l.Items, gpuOrders[by], func(a, b scrape.GPU) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.PCIBusID, b.PCIBusID))
	})
}

// Sort orders nodes by a value of --sort-by, and by name among equals.
func (l *NodeUsageList) Sort(by string) {
	sortBy(l.Items, nodeOrders[by], func(a, b NodeUsage) int { return cmp.Compare(a.Node, b.Node) })
}

// Table shows GPUs to people.
func (l *GPUUsageList) Table() *printer.Table {
	t := &printer.Table{
		Columns: printer.Columns("node", "gpu", "product", "role", "memory", "allocated", "used", "busy", "temperature", "healthy",
			"+address", "+uuid"),
		Empty: "The driver tells of no GPU.",
	}
	for _, g := range l.Items {
		temperature, healthy, style := printer.Unknown, printer.Unknown, printer.Plain
		if g.Temperature != nil {
			temperature = fmt.Sprintf("%.0f°C", *g.Temperature)
		}
		if g.Healthy != nil {
			healthy = "yes"
			if !*g.Healthy {
				healthy, style = "no", printer.Bad
			}
		}
		t.Rows = append(t.Rows, printer.Row{Name: "node/" + g.Node, Style: style, Cells: []string{
			g.Node, fleet.ShortAddress(g.PCIBusID), g.ProductName, cmp.Or(g.Role, printer.Unknown), printer.BytesOrUnknown(g.MemoryBytes), printer.BytesOrUnknown(g.AllocatedBytes),
			printer.BytesOrUnknown(g.UsedBytes), printer.PercentOrUnknown(g.Utilization), temperature, healthy, g.PCIBusID, g.UUID,
		}})
	}
	return t
}

// NodeUsageList is what kubectl gpu top nodes prints.
type NodeUsageList struct {
	metav1.TypeMeta `json:",inline"`

	Items []NodeUsage `json:"items"`
}

// NodeUsage is what is used of a node's GPUs. What is not known of one of them is not known of the node.
type NodeUsage struct {
	Node string `json:"node"`
	GPUs int    `json:"gpus"`
	// Unhealthy are those that are known to be.
	Unhealthy      int    `json:"unhealthy"`
	HealthUnknown  int    `json:"healthUnknown,omitempty"`
	MemoryBytes    *int64 `json:"memoryBytes,omitempty"`
	AllocatedBytes *int64 `json:"allocatedBytes,omitempty"`
	UsedBytes      *int64 `json:"usedBytes,omitempty"`
}

// Nodes sums up GPUs by node.
func Nodes(r *scrape.Result) *NodeUsageList {
	list := &NodeUsageList{TypeMeta: printer.TypeMeta("NodeUsageList"), Items: []NodeUsage{}}
	for _, g := range r.GPUs {
		n := len(list.Items) - 1
		if n < 0 || list.Items[n].Node != g.Node {
			list.Items = append(list.Items, NodeUsage{Node: g.Node, MemoryBytes: new(int64), AllocatedBytes: new(int64), UsedBytes: new(int64)})
			n++
		}
		u := &list.Items[n]
		u.GPUs++
		switch {
		case g.Healthy == nil:
			u.HealthUnknown++
		case !*g.Healthy:
			u.Unhealthy++
		}
		u.MemoryBytes = sum(u.MemoryBytes, g.MemoryBytes)
		u.AllocatedBytes = sum(u.AllocatedBytes, g.AllocatedBytes)
		u.UsedBytes = sum(u.UsedBytes, g.UsedBytes)
	}
	return list
}

func sum(a, b *int64) *int64 {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}

// Table shows nodes to people.
func (l *NodeUsageList) Table() *printer.Table {
	t := &printer.Table{Columns: printer.Columns("node", "gpus", "unhealthy", "memory", "allocated", "used", "allocated%", "used%"), Empty: "The driver tells of no GPU."}
	for _, n := range l.Items {
		unhealthy := fmt.Sprint(n.Unhealthy)
		if n.HealthUnknown > 0 {
			unhealthy += fmt.Sprintf(" (%d unknown)", n.HealthUnknown)
		}
		row := printer.Row{Name: "node/" + n.Node, Cells: []string{
			n.Node, fmt.Sprint(n.GPUs), unhealthy, printer.BytesOrUnknown(n.MemoryBytes), printer.BytesOrUnknown(n.AllocatedBytes), printer.BytesOrUnknown(n.UsedBytes),
			part(n.AllocatedBytes, n.MemoryBytes), part(n.UsedBytes, n.MemoryBytes),
		}}
		if n.Unhealthy > 0 {
			row.Style = printer.Bad
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func part(some, all *int64) string {
	if some == nil || all == nil || *all == 0 {
		return printer.Unknown
	}
	return printer.PercentOrUnknown(new(float64(*some) / float64(*all)))
}
