// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
)

// machines are what all nodes of a cluster have in turn. The first is what the others are compared with.
var machines = []struct{ name, file string }{
	{"8 H100, NVIDIA's DRA driver", "reference"},
	{"8 H100", "dgx-h100"},
	{"8 A100 in MIG mode", "dgx-a100"},
	{"8 L4", "l4"},
}

// Report measures clusters of so many nodes, whose slices are in a folder, and writes a table.
func Report(ctx context.Context, out io.Writer, dir string, nodes int) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(table, "%d nodes with\tslices\tprotobuf\tscheduler's heap\ta node\tpart of NVIDIA's\t\n", nodes)
	var first int64
	for _, m := range machines {
		published, err := Load(dir, m.file)
		if err != nil {
			return err
		}
		s, err := Measure(ctx, published, nodes)
		if err != nil {
			return fmt.Errorf("%d nodes with %s: %w", nodes, m.name, err)
		}
		if first == 0 {
			first = s.Heap
		}
		fmt.Fprintf(table, "%s\t%d\t%.0f MB\t%.0f MB\t%.0f KB\t%.2f\t\n", m.name, nodes*len(published),
			float64(s.Sent)/1e6, float64(s.Heap)/1e6, float64(s.Heap)/1e3/float64(nodes), float64(s.Heap)/float64(first))
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}
