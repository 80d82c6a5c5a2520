// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// View shows a tree to people.
func View(t *Tree) printer.View {
	v := &printer.Text{Render: func(w io.Writer, f printer.Format) error { return write(w, f, t) }}
	for _, n := range t.Nodes {
		v.Named = append(v.Named, "node/"+n.Name)
	}
	return v
}

// branch is a line with what is below it.
type branch struct {
	text     string
	children []branch
}

func write(w io.Writer, f printer.Format, t *Tree) error {
	var out bytes.Buffer
	if len(t.Nodes) == 0 && len(t.Unpublished) == 0 {
		fmt.Fprintf(&out, "No node has devices of driver %s.\n", t.Driver)
	}
	r := renderer{f}
	for _, n := range t.Nodes {
		r.print(&out, r.node(n))
	}
	if len(t.Unpublished) > 0 {
		lost := branch{text: f.Paint(printer.Warn, "Claims have these, and no ResourceSlice does:")}
		for _, d := range t.Unpublished {
			lost.children = append(lost.children, r.device(d, d.Pool+"/"+d.Name))
		}
		r.print(&out, lost)
	}
	if len(t.Nodes) > 0 {
		out.WriteString(f.Paint(printer.Faint, r.legend()) + "\n")
	}
	_, err := out.WriteTo(w)
	return err
}

type renderer struct{ printer.Format }

func (r renderer) print(out *bytes.Buffer, b branch) {
	out.WriteString(b.text + "\n")
	r.below(out, b.children, "")
}

func (r renderer) below(out *bytes.Buffer, children []branch, indent string) {
	each, last, through := "├─ ", "└─ ", "│  "
	if !r.Unicode {
		each, last, through = "|- ", "`- ", "|  "
	}
	for i, c := range children {
		joint, further := each, through
		if i == len(children)-1 {
			joint, further = last, "   "
		}
		out.WriteString(strings.TrimRight(indent+joint+c.text, " ") + "\n")
		r.below(out, c.children, indent+further)
	}
}

// Marks of cells without a claim that is named.
func (r renderer) symbol(state string) string {
	if r.Unicode {
		return map[string]string{CellFree: "·", CellTaken: "▒", CellShared: "≡", CellBlocked: "×"}[state]
	}
	return map[string]string{CellFree: ".", CellTaken: "#", CellShared: "=", CellBlocked: "x"}[state]
}

func (r renderer) legend() string {
	return fmt.Sprintf("[A%s%s%s%s]: memory slices of claim A, of somebody else's claim, of a shared device, free, not to be allocated",
		r.symbol(CellTaken), r.symbol(CellShared), r.symbol(CellFree), r.symbol(CellBlocked))
}

func (r renderer) node(n Node) branch {
	b := branch{text: r.Paint(printer.Bold, n.Name)}
	for _, p := range n.Problems {
		b.text += "  " + r.Paint(printer.Bad, printer.Escape(p))
	}
	for _, g := range n.GPUs {
		b.children = append(b.children, r.gpu(g))
	}
	return b
}

func (r renderer) gpu(g GPU) branch {
	b := branch{text: fmt.Sprintf("%s %s  %s", r.strip(g), r.Paint(printer.Bold, g.Name), g.ProductName)}
	if g.MemoryBytes > 0 {
		b.text += "  " + Bytes(g.MemoryBytes)
	}
	if r.Wide {
		b.text += "  " + g.UUID
	}
	for _, t := range g.Taints {
		text := t.Key
		if t.Value != "" {
			text += "=" + t.Value
		}
		text = printer.Escape(fmt.Sprintf("taint %s:%s on %d of %d devices", text, t.Effect, t.Devices, t.Of))
		b.children = append(b.children, branch{text: r.Paint(printer.Warn, text)})
	}
	for _, d := range g.Devices {
		b.children = append(b.children, r.device(d, label(d)))
	}
	b.children = append(b.children, branch{text: r.free(g.Free)})
	return b
}

// Colours of claims, in turn.
var palette = []printer.Style{"36", "35", "34", "32", "33", "96", "95", "94"}

func claimStyle(mark string) printer.Style {
	return palette[max(0, strings.Index(letters, mark))%len(palette)]
}

func (r renderer) strip(g GPU) string {
	var b strings.Builder
	for _, c := range g.Cells {
		switch {
		case c.Mark != "":
			b.WriteString(r.Paint(claimStyle(c.Mark), c.Mark))
		case c.State == CellBlocked:
			b.WriteString(r.Paint(printer.Bad, r.symbol(c.State)))
		default:
			b.WriteString(r.symbol(c.State))
		}
	}
	return "[" + b.String() + "]"
}

// label is what the device is; its name has more of it than people want to read.
func label(d Device) string {
	if d.Type == fleet.TypeMIG {
		return d.Profile
	}
	text := map[string]string{fleet.TypeGPU: "whole GPU", fleet.TypeMPS: "MPS", fleet.TypeTimeSlice: "time slices", fleet.TypeObserver: "observer"}[d.Type]
	if d.Profile != "" {
		text = d.Profile + " " + text
	}
	return text
}

func (r renderer) device(d Device, label string) branch {
	text := label
	if n := len(d.Placement); n > 0 {
		text += fmt.Sprintf(" at slice %d", d.Placement[0])
	}
	if name := d.Pool + "/" + d.Name; r.Wide && label != name {
		text += "  " + name
	}
	if d.Shares == 0 && len(d.Claims) == 1 {
		b := r.claim(d.Claims[0])
		b.text = text + "  " + b.text
		return b
	}
	b := branch{text: text}
	if d.Shares > 0 {
		b.text += fmt.Sprintf("  shared by %d of at most %d", len(d.Claims), d.Shares)
	}
	for _, c := range d.Claims {
		b.children = append(b.children, r.claim(c))
	}
	return b
}

func (r renderer) claim(c Claim) branch {
	b := branch{text: "somebody else's claim"}
	if c.Name != "" {
		b.text = strings.TrimLeft(fmt.Sprintf("%s %s/%s", r.Paint(claimStyle(c.Mark), c.Mark), c.Namespace, c.Name), " ")
	}
	if c.AdminAccess {
		b.text += "  admin access"
	}
	if c.MemoryBytes > 0 {
		b.text += "  " + Bytes(c.MemoryBytes)
	}
	if c.SMPercent > 0 {
		b.text += fmt.Sprintf("  %d %% SM", c.SMPercent)
	}
	if r.Wide && c.UUID != "" {
		b.text += "  " + c.UUID
	}
	if c.NotReady != "" {
		b.text += "  " + r.Paint(printer.Bad, printer.Escape("not ready: "+c.NotReady))
	}
	for _, p := range c.Pods {
		b.children = append(b.children, branch{text: strings.TrimRight(fmt.Sprintf("pod %s  %s", p.Name, p.Phase), " ")})
	}
	return b
}

func (r renderer) free(f Free) string {
	var parts []string
	if f.Whole {
		parts = append(parts, "whole GPU")
	}
	for _, p := range f.Partitions {
		parts = append(parts, fmt.Sprintf("%d of %s", p.Count, p.Profile))
	}
	for _, s := range f.Shares {
		parts = append(parts, share(s))
	}
	if len(parts) == 0 {
		return r.Paint(printer.Faint, "fits: nothing")
	}
	return r.Paint(printer.Good, "fits: "+strings.Join(parts, ", or "))
}

func share(s Share) string {
	text := map[string]string{fleet.TypeMPS: "MPS", fleet.TypeTimeSlice: "time-slice"}[s.Type]
	if s.Profile != "" {
		text += " of a " + s.Profile
	}
	noun := "shares"
	if s.Shares == 1 {
		noun = "share"
	}
	text = fmt.Sprintf("%d %s %s", s.Shares, text, noun)
	var most []string
	if s.MemoryBytes > 0 {
		most = append(most, Bytes(s.MemoryBytes))
	}
	if s.SMPercent > 0 {
		most = append(most, fmt.Sprintf("%d %% SM", s.SMPercent))
	}
	if len(most) > 0 {
		text += " (up to " + strings.Join(most, ", ") + ")"
	}
	return text
}

// Bytes writes a size as manifests do, in the largest unit that shows it with a decimal at most.
func Bytes(n int64) string {
	const gi = 1 << 30
	if n >= gi {
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/gi), ".0") + "Gi"
	}
	return resource.NewQuantity((n+1<<20-1)>>20<<20, resource.BinarySI).String()
}
