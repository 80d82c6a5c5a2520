// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/partage-dev/partage/pkg/gpu"
)

// patchTemplate prints a board with the layout of the catalogue's files, so that the two
// are easily compared.
var patchTemplate = template.Must(template.New("board").Funcs(template.FuncMap{
	"list": func(numbers []int) string {
		var texts []string
		for _, n := range numbers {
			texts = append(texts, strconv.Itoa(n))
		}
		return strings.Join(texts, ", ")
	},
}).Parse(`---
name: {{.Name}}

{{with .Product}}product:
  source: {{.Source}}
  name: {{.Name}}
  architecture: {{.Architecture}}
  computeCapability: "{{.ComputeCapability}}"
{{- with .PCIDevice}}
  pciDevice: "{{.}}"{{end}}
  memoryMiB: {{.MemoryMiB}}
{{- with .ReservedMiB}}
  reservedMiB: {{.}}{{end}}
{{- with .SMs}}
  sms: {{.}}{{end}}
{{- with .AddressingMode}}
  addressingMode: {{.}}{{end}}
  ecc: {{.ECC}}
{{end}}{{with .MPS}}
mps:
  source: {{.Source}}
{{- with .ServerMiB}}
  serverMiB: {{.}}{{end}}
{{- with .ContextMiB}}
  contextMiB: {{.}}{{end}}
{{- with .MIGContextMiB}}
  migContextMiB: {{.}}{{end}}
{{end}}{{with .MIG}}
mig:
  source: {{.Source}}
  memorySlices: {{.MemorySlices}}
  resetToSwitch: {{.ResetToSwitch}}
  profiles:
{{- range .Profiles}}
  - name: {{.Name}}
    source: {{.Source}}
    id: {{.ID}}
    slices: {{.Slices}}
    max: {{.Max}}
    sms: {{.SMs}}
    memoryMiB: {{.MemoryMiB}}
    engines: {{with .Engines}}{copy: {{.Copy}}, decode: {{.Decode}}, encode: {{.Encode}}, jpeg: {{.JPEG}}, ofa: {{.OFA}}}{{end}}
    placements: {size: {{.Placements.Size}}, starts: [{{list .Placements.Starts}}]}
{{- with .InstanceIDs}}
    instanceIDs: [{{list .}}]{{end}}
{{- end}}
{{end}}`))

// latencyTemplate prints an entry of the catalogue of latencies.
var latencyTemplate = template.Must(template.New("latencies").Parse(`---
# For latencies.yaml.
- name: {{.Name}}
  description: measured on {{.Product}}
  calls:
{{- range .Calls}}
  - {function: {{.Function}}, source: measured, base: {{.Base}}}
{{- end}}
`))

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
	if err := patchTemplate.Execute(out, board); err != nil {
		return err
	}
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
	if len(calls) == 0 {
		return nil
	}
	slices.SortFunc(calls, func(a, b callLatency) int { return strings.Compare(a.Function, b.Function) })
	return latencyTemplate.Execute(out, struct {
		Name, Product string
		Calls         []callLatency
	}{board.Name, g.ProductName, calls})
}
