// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/template"
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
{{- end}}
{{end}}`))

// WriteCataloguePatch writes what was measured of the GPUs, one document for each product,
// in the form of test/gpusim/catalog/boards. It is meant to be merged by hand into the
// board's file: values that nobody measured are not in it.
func (n *Node) WriteCataloguePatch(ctx context.Context, out io.Writer) error {
	node, err := n.GPUs(ctx)
	if err != nil {
		return fmt.Errorf("write what was measured: %w", err)
	}
	if _, err := fmt.Fprintf(out, "# Measured on %s by gpu-kubelet-plugin %s with driver %s.\n",
		n.header.Time, n.header.Version, node.DriverVersion); err != nil {
		return fmt.Errorf("write what was measured: %w", err)
	}
	written := map[string]bool{}
	for i := range node.GPUs {
		g := &node.GPUs[i]
		if written[g.ProductName] {
			continue
		}
		written[g.ProductName] = true
		facts, err := n.facts(ctx, g)
		if err != nil {
			return fmt.Errorf("write what was measured: %w", err)
		}
		if err := patchTemplate.Execute(out, measure(g, facts)); err != nil {
			return fmt.Errorf("write what was measured of %s: %w", g.ProductName, err)
		}
	}
	return nil
}
