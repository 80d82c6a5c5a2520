// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/width"
	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// View shows a tree to people.
func View(t *Tree) printer.View {
	v := &printer.Text{Render: t.write}
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

func (t *Tree) write(out *bytes.Buffer, f printer.Format) error {
	switch {
	case len(t.Nodes) > 0 || len(t.Unpublished) > 0:
	case t.of > 0:
		fmt.Fprintf(out, "None of the %d nodes with devices of driver %s is known to have these labels.\n", t.of, t.Driver)
	default:
		fmt.Fprintf(out, "No node has devices of driver %s.\n", t.Driver)
	}
	r := renderer{f}
	for _, n := range t.Nodes {
		r.print(out, r.node(n))
	}
	if len(t.Unpublished) > 0 {
		lost := branch{text: f.Paint(printer.Warn, "Claims have these, and no ResourceSlice does:")}
		for _, d := range t.Unpublished {
			lost.children = append(lost.children, r.device(d, d.Pool+"/"+d.Name))
		}
		r.print(out, lost)
	}
	if len(t.Nodes) > 0 {
		out.WriteString(t.largest() + "\n")
		out.WriteString(f.Paint(printer.Faint, legend) + "\n")
	}
	return nil
}

// largest says what of the largest still fits on the nodes that are shown, as far as they take pods.
func (t *Tree) largest() string {
	what, on, most, atMost := "nothing", 0, int64(-1), false
	add := func(size int64, name string) {
		// The names of profiles with as much memory begin with their compute slices.
		if size > most || size == most && name > what {
			what, on, most = name, 0, size
		}
		if name == what {
			on++
		}
	}
	for _, n := range t.Nodes {
		if len(n.Problems) > 0 {
			continue // it takes no pods
		}
		for _, g := range n.GPUs {
			atMost = atMost || g.Free.AtMost
			if g.Free.Whole {
				add(math.MaxInt64, "a whole GPU")
			}
			for _, p := range g.Free.Partitions {
				add(p.MemoryBytes, "a partition "+p.Profile)
			}
			if len(g.Free.Shares) > 0 {
				add(0, "a share of a GPU")
			}
		}
	}
	if on > 0 {
		what += fmt.Sprintf(", on %d of the GPUs", on)
	}
	if atMost {
		return "Largest that still fits: unknown, at most " + what
	}
	return "Largest that still fits: " + what
}

type renderer struct{ printer.Format }

func (r renderer) print(out *bytes.Buffer, b branch) {
	out.WriteString(b.text + "\n")
	r.below(out, b.children, "")
}

func (r renderer) below(out *bytes.Buffer, children []branch, indent string) {
	for i, c := range children {
		joint, further := "├─ ", "│  "
		if i == len(children)-1 {
			joint, further = "└─ ", "   "
		}
		out.WriteString(strings.TrimRight(indent+joint+c.text, " ") + "\n")
		r.below(out, c.children, indent+further)
	}
}

// symbols of cells that are not one claim's, which the legend explains.
var symbols = map[string]string{CellFree: "·", CellShared: "≡", CellBlocked: "×", CellUnknown: "?"}

const legend = "[A≡·×?]: memory slices of claim A, of a shared device, free, blocked, unknown"

func (r renderer) node(n Node) branch {
	b := branch{text: r.Paint(printer.Bold, n.Name)}
	for _, p := range n.Problems {
		b.text += "  " + r.Paint(printer.Bad, p)
	}
	for i := 0; i < len(n.GPUs); {
		alike := 1
		for i+alike < len(n.GPUs) && unused(&n.GPUs[i]) && reflect.DeepEqual(room(n.GPUs[i]), room(n.GPUs[i+alike])) {
			alike++
		}
		b.children = append(b.children, r.gpu(n.GPUs[i], n.GPUs[i:i+alike]))
		i += alike
	}
	return b
}

func unused(g *GPU) bool { return len(g.Devices) == 0 && len(g.Taints) == 0 }

// room is what two GPUs have in common of which one line is shown.
func room(g GPU) GPU {
	g.Label, g.Name, g.UUID, g.PCIBusID = "", "", "", ""
	for i := range g.Free.Shares {
		g.Free.Shares = slices.Clone(g.Free.Shares)
		g.Free.Shares[i].Device, g.Free.Shares[i].Name = nil, ""
	}
	return g
}

// gpu shows one for those that are alike.
func (r renderer) gpu(g GPU, alike []GPU) branch {
	name, product := g.Label, g.ProductName
	if n := len(alike); n > 1 {
		name += " to " + strings.TrimPrefix(alike[n-1].Label, "GPU ")
		product = fmt.Sprintf("%d × %s", n, product)
	}
	if !r.Wide {
		product = strings.TrimSuffix(strings.Replace(product, "NVIDIA ", "", 1), " Edition")
	}
	b := branch{text: fmt.Sprintf("%s %s  %s", r.strip(g), r.Paint(printer.Bold, name), product)}
	if g.MemoryBytes > 0 {
		b.text += "  " + printer.Bytes(g.MemoryBytes)
	}
	if r.Wide {
		b.text += "  " + g.Name + "  " + g.UUID
	}
	for _, t := range g.Taints {
		text := t.Key
		if t.Value != "" {
			text += "=" + t.Value
		}
		on := "all"
		if t.Devices < t.Of {
			on = fmt.Sprintf("%d of %d", t.Devices, t.Of)
		}
		text = fmt.Sprintf("taint %s:%s on %s devices", text, t.Effect, on)
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
			b.WriteString(r.Paint(printer.Bad, symbols[c.State]))
		default:
			b.WriteString(symbols[c.State])
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
		least := map[bool]string{true: "at least "}[d.AtLeast]
		b.text += fmt.Sprintf("  shared by %s%d of at most %d", least, len(d.Claims), d.Shares)
	}
	for _, c := range d.Claims {
		b.children = append(b.children, r.claim(c))
	}
	return b
}

func (r renderer) claim(c Claim) branch {
	// People know their pods; the names of most claims are made up.
	alone := len(c.Pods) == 1
	what := fmt.Sprintf("claim %s/%s", c.Namespace, c.Name)
	if alone {
		what = fmt.Sprintf("pod %s/%s", c.Namespace, c.Pods[0].text(r.Wide))
		if r.Wide {
			what += "  claim " + c.Name
		}
	}
	b := branch{text: strings.TrimLeft(r.Paint(claimStyle(c.Mark), c.Mark)+" "+what, " ")}
	if c.AdminAccess {
		b.text += "  admin access"
	}
	if c.MemoryBytes > 0 {
		b.text += "  " + printer.Bytes(c.MemoryBytes)
	}
	if c.SMPercent > 0 {
		b.text += fmt.Sprintf("  %d %% SM", c.SMPercent)
	}
	if r.Wide && c.UUID != "" {
		b.text += "  " + c.UUID
	}
	if c.NotReady != "" {
		b.children = append(b.children, branch{text: r.Paint(printer.Bad, r.cut("not ready: "+c.NotReady))})
	}
	for i := range c.Pods {
		if !alone {
			b.children = append(b.children, branch{text: "pod " + c.Pods[i].text(r.Wide)})
		}
	}
	return b
}

// mostCut is how much of a message fits into 80 columns, below a claim.
const mostCut = 66

// cut shortens a message, of which -o wide has the rest.
func (r renderer) cut(text string) string {
	columns, short := 0, 0
	for at, c := range text {
		columns++
		if k := width.LookupRune(c).Kind(); k == width.EastAsianWide || k == width.EastAsianFullwidth {
			columns++
		}
		if columns > mostCut && !r.Wide {
			return text[:short] + "..."
		}
		if columns <= mostCut-3 {
			short = at + utf8.RuneLen(c)
		}
	}
	return text
}

// text leaves out what goes without saying unless it is wide: that a pod runs, and the name of the owner where the pod's begins with it.
func (p *Pod) text(wide bool) string {
	text := p.Name
	if kind, name, _ := strings.Cut(p.Owner, " "); !wide && name != "" && strings.HasPrefix(p.Name, name+"-") {
		text += " (" + kind + ")"
	} else if p.Owner != "" {
		text += " of " + p.Owner
	}
	if !wide && p.Phase == string(corev1.PodRunning) {
		return text
	}
	return strings.TrimRight(text+"  "+p.Phase, " ")
}

// Fits says what a GPU still has room for, each by itself.
func Fits(f fleet.Room) []string { return renderer{printer.Format{Wide: true}}.fits(f, f.Whole) }

func (r renderer) fits(f fleet.Room, short bool) []string {
	parts := r.partitions(f)
	for _, s := range f.Shares {
		parts = append(parts, share(s, short))
	}
	return parts
}

func (r renderer) free(f fleet.Room) string {
	parts := r.fits(f, f.Whole && !r.Wide)
	switch {
	case len(parts) == 0:
		return r.Paint(printer.Faint, "fits: nothing")
	case f.AtMost:
		return r.Paint(printer.Warn, "fits: unknown, at most "+strings.Join(parts, " | "))
	}
	return r.Paint(printer.Good, "fits: "+strings.Join(parts, " | "))
}

// partitions says which fit: the smallest and the largest say enough and, where the whole GPU fits, the smallest.
func (r renderer) partitions(f fleet.Room) (parts []string) {
	if f.Whole {
		parts = append(parts, "whole GPU")
	}
	for i, p := range f.Partitions {
		text, isLast := fmt.Sprintf("%d × %s", p.Count, p.Profile), i == len(f.Partitions)-1
		switch {
		case i == 0 || r.Wide || !f.Whole && isLast && i == 1:
			parts = append(parts, text)
		case !f.Whole && isLast:
			parts[len(parts)-1] += " … " + text
		}
	}
	return parts
}

// share says what is left of a shared device, and in short only how many fit.
func share(s fleet.ShareRoom, short bool) string {
	text := map[string]string{fleet.TypeMPS: "MPS", fleet.TypeTimeSlice: "time slice"}[s.Type]
	if s.Profile != "" {
		text += " of a " + s.Profile
	}
	text = fmt.Sprintf("%d × %s", s.Shares, text)
	if short {
		return text
	}
	var most []string
	if s.MemoryBytes > 0 {
		most = append(most, printer.Bytes(s.MemoryBytes))
	}
	if s.SMPercent > 0 {
		most = append(most, fmt.Sprintf("%d %% SM", s.SMPercent))
	}
	if len(most) > 0 {
		text += " (up to " + strings.Join(most, ", ") + ")"
	}
	return text
}
