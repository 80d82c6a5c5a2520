// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// document is a part of the catalogue. It has no template: with text/template the linker keeps
// every exported method of the driver, which costs a fifth of its memory.
type document struct{ bytes.Buffer }

func (d *document) line(format string, arguments ...any) {
	fmt.Fprintf(d, format+"\n", arguments...)
}

// optional writes a value that may be absent.
func optional[T comparable](d *document, key string, value *T) {
	if value != nil {
		d.line("  %s: %v", key, *value)
	}
}

// known writes a value unless it is the one for an unknown.
func known[T comparable](d *document, key string, value T) {
	var unknown T
	if value != unknown {
		d.line("  %s: %v", key, value)
	}
}

// board writes a board with the layout of the catalogue's files, so that the two are easily
// compared.
func (d *document) board(b *Board) {
	d.line("---\nname: %s\n", b.Name)
	d.product(&b.Product)
	if b.MPS != nil {
		d.line("\nmps:\n  source: %s", b.MPS.Source)
		optional(d, "serverMiB", b.MPS.ServerMiB)
		optional(d, "contextMiB", b.MPS.ContextMiB)
		optional(d, "migContextMiB", b.MPS.MIGContextMiB)
	}
	if b.MIG != nil {
		d.line("\nmig:\n  source: %s\n  memorySlices: %d\n  resetToSwitch: %t\n  profiles:", b.MIG.Source, b.MIG.MemorySlices, b.MIG.ResetToSwitch)
		for i := range b.MIG.Profiles {
			d.profile(&b.MIG.Profiles[i])
		}
	}
}

func (d *document) product(p *Product) {
	d.line("product:\n  source: %s\n  name: %s\n  architecture: %s\n  computeCapability: %q", p.Source, p.Name, p.Architecture, p.ComputeCapability)
	if p.PCIDevice != "" {
		d.line("  pciDevice: %q", p.PCIDevice)
	}
	d.line("  memoryMiB: %d", p.MemoryMiB)
	optional(d, "reservedMiB", p.ReservedMiB)
	known(d, "sms", p.SMs)
	known(d, "addressingMode", p.AddressingMode)
	d.line("  ecc: %s", p.ECC)
}

func (d *document) profile(p *Profile) {
	d.line("  - name: %s\n    source: %s\n    id: %d\n    slices: %d\n    max: %d\n    sms: %d\n    memoryMiB: %d",
		p.Name, p.Source, p.ID, p.Slices, p.Max, p.SMs, p.MemoryMiB)
	d.line("    engines: {copy: %d, decode: %d, encode: %d, jpeg: %d, ofa: %d}",
		p.Engines.Copy, p.Engines.Decode, p.Engines.Encode, p.Engines.JPEG, p.Engines.OFA)
	d.line("    placements: {size: %d, starts: [%s]}", p.Placements.Size, list(p.Placements.Starts))
	if len(p.InstanceIDs) > 0 {
		d.line("    instanceIDs: [%s]", list(p.InstanceIDs))
	}
}

func list(numbers []int) string {
	var texts []string
	for _, n := range numbers {
		texts = append(texts, strconv.Itoa(n))
	}
	return strings.Join(texts, ", ")
}

// latencies writes an entry of the catalogue of latencies.
func (d *document) latencies(name, product string, calls []callLatency) {
	d.line("---\n# For latencies.yaml.\n- name: %s\n  description: measured on %s\n  calls:", name, product)
	for _, c := range calls {
		d.line("  - {function: %s, source: measured, base: %s}", c.Function, c.Base)
	}
}

// WriteCataloguePatch writes what was measured of the GPUs, one document for each product in
// the form of test/gpusim/catalog/boards, and one in that of latencies.yaml beside it where
// calls took a time that counts. It is meant to be merged by hand: values that nobody
// measured are not in it.
func (n *Node) WriteCataloguePatch(ctx context.Context, out io.Writer) error {
	node, err := n.GPUs(ctx)
	if err == nil {
		_, err = fmt.Fprintf(out, "# Measured on %s by gpu-kubelet-plugin %s with driver %s.\n",
			n.header.Time, n.header.Version, node.DriverVersion)
	}
	if err != nil {
		return fmt.Errorf("write what was measured: %w", err)
	}
	written := map[string]bool{}
	for i := range node.GPUs {
		g := &node.GPUs[i]
		if written[g.ProductName] {
			continue
		}
		written[g.ProductName] = true
		if err := n.writeProduct(ctx, out, node, g); err != nil {
			return fmt.Errorf("write what was measured of %s: %w", g.ProductName, err)
		}
	}
	return nil
}

// writeProduct writes what was measured of a GPU and of all others of its product.
func (n *Node) writeProduct(ctx context.Context, out io.Writer, node *gpu.Node, g *gpu.GPU) error {
	facts, err := n.facts(ctx, g)
	if err != nil {
		return err
	}
	board, more := measure(g, facts), n.measuredOf(g)
	board.add(more)
	d := &document{}
	d.board(&board)
	var same []string
	for i := range node.GPUs {
		if node.GPUs[i].ProductName == g.ProductName {
			same = append(same, node.GPUs[i].PCIAddress)
		}
	}
	calls := n.calls.of(same)
	if more.serverStart >= leastLatency {
		calls = append(calls, callLatency{"mps_server_start", more.serverStart})
	}
	if len(calls) > 0 {
		slices.SortFunc(calls, func(a, b callLatency) int { return strings.Compare(a.Function, b.Function) })
		d.latencies(board.Name, g.ProductName, calls)
	}
	_, err = d.WriteTo(out)
	return err
}
