// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// defaultLimit is how many drains of a profile are shown.
const defaultLimit = 5

// NewCommand returns the command fragmentation.
func NewCommand(o *options.Options) *cobra.Command {
	find := Options{Limit: defaultLimit}
	c := &cobra.Command{
		Use:   "fragmentation [NODE...] [--profile PROFILE]",
		Short: "See which partitions would fit if others lay elsewhere, and what would have to end for them",
		Long: "Show on which GPUs and nodes more partitions of a profile would fit if those that claims have lay closer together, and, for profiles that fit nowhere, " +
			"which claims would have to end. Claims whose pods all have a controller come first: their pods are made anew elsewhere. " +
			"Each suggestion was confirmed by the scheduler's allocator. With --profile the exit code is 2 if the profile fits nowhere now.",
		Example: "  kubectl gpu fragmentation\n  kubectl gpu fragmentation --profile 3g.40gb gpu-1",
		RunE: func(c *cobra.Command, nodes []string) error {
			client, err := o.Client()
			if err != nil {
				return err
			}
			find.Nodes = nodes
			return run(c.Context(), o, client, find)
		},
	}
	c.Flags().StringVar(&find.Profile, "profile", "", "Look at this profile only, such as 3g.40gb")
	c.Flags().IntVar(&find.Limit, "limit", find.Limit, "Show so many ways at most to make room for a profile, 0 for all")
	o.AddOutputFlag(c)
	return c
}

// run reads the cluster and prints the report.
func run(ctx context.Context, o *options.Options, client kubernetes.Interface, find Options) error {
	snapshot, err := fleet.Read(ctx, client, "")
	if err != nil {
		return err
	}
	if err := snapshot.Need("", fleet.ResourceSlices); err != nil {
		return err
	}
	// The allocator gets a class of its own.
	snapshot.Warn(o.ErrOut, fleet.ResourceClasses, fleet.ResourceTemplates)
	report, err := Find(ctx, fleet.New(snapshot, o.Driver), find)
	if err != nil {
		return err
	}
	if err := printer.Print(o, report, view(report)); err != nil {
		return err
	}
	if find.Profile != "" && report.Profiles[0].Now == 0 {
		return options.ErrFound
	}
	return nil
}

func view(r *Report) printer.View {
	var names []string
	for _, d := range r.Drains {
		names = append(names, "node/"+d.Node)
	}
	return &printer.Text{Named: names, Render: func(w io.Writer, f printer.Format) error {
		var out bytes.Buffer
		if err := r.write(&out, f); err != nil {
			return err
		}
		_, err := out.WriteTo(w)
		return err
	}}
}

func (r *Report) write(out *bytes.Buffer, f printer.Format) error {
	totals := &printer.Table{Columns: printer.Columns("profile", "fits now", "if packed"), Empty: "No GPU offers partitions."}
	for _, t := range r.Profiles {
		row := printer.Row{Cells: []string{t.Profile, strconv.Itoa(t.Now), strconv.Itoa(t.Packed)}}
		switch {
		case t.Now == 0:
			row.Style = printer.Bad
		case t.Packed > t.Now:
			row.Style = printer.Warn
		}
		totals.Rows = append(totals.Rows, row)
	}
	if err := totals.Write(out, f); err != nil {
		return err
	}
	if len(r.Lost) > 0 {
		out.WriteString("\nMore would fit if partitions lay elsewhere:\n")
		lost := &printer.Table{Columns: printer.Columns("node", "gpu", "profile", "fits now", "if packed", "held")}
		for _, l := range r.Lost {
			gpu := l.GPU
			if gpu == "" {
				gpu = "(all together)"
			}
			lost.Rows = append(lost.Rows, printer.Row{Cells: []string{l.Node, gpu, l.Profile, strconv.Itoa(l.Now), strconv.Itoa(l.Packed), strings.Join(l.Held, " ")}})
		}
		if err := lost.Write(out, f); err != nil {
			return err
		}
	}
	if len(r.Drains) > 0 {
		out.WriteString("\nA partition would fit once these claims have ended:\n")
		drains := &printer.Table{Columns: printer.Columns("profile", "node", "gpu", "claims", "pods", "note")}
		for _, d := range r.Drains {
			drains.Rows = append(drains.Rows, d.row())
		}
		if err := drains.Write(out, f); err != nil {
			return err
		}
	}
	if r.Unconfirmed > 0 {
		fmt.Fprintf(out, "\n%d suggestions are left out, as the scheduler's allocator did not confirm them.\n", r.Unconfirmed)
	}
	return nil
}

func (d Drain) row() printer.Row {
	var claims, pods, notes []string
	for _, c := range d.Claims {
		claims = append(claims, c.Namespace+"/"+c.Name)
		pods = append(pods, c.Pods...)
		if c.Why != "" {
			notes = append(notes, c.Name+": "+c.Why)
		}
	}
	row := printer.Row{Cells: []string{d.Profile, d.Node, d.GPU, strings.Join(claims, " "), strings.Join(pods, " "), strings.Join(notes, "; ")}}
	if !d.Drainable {
		row.Style = printer.Faint
	}
	return row
}
