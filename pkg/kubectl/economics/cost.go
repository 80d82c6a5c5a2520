// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// NewCost returns the command.
func NewCost(o *options.Options) *cobra.Command {
	price := 0.0
	c := &cobra.Command{
		Use:   "cost",
		Short: "Show what workloads cost, and what sharing saves",
		Long: `Show what workloads cost on the GPUs of the cluster, and what sharing saves.

It goes by what claims have now, as if it stayed so; it knows no history. A GPU in use is paid
by the claims on it, each by its part of memory or multiprocessors, whichever is more, or of
the shares. What no claim has is a line of its own, and so is what none can have, so that the
lines add up. Nothing knows what your GPUs cost: without a price the command speaks of GPUs and
hours only.

-n shows the claims of one namespace; the GPUs are always those of the whole cluster.`,
		Example: `  kubectl gpu cost
  kubectl gpu cost --price 3.25 -o wide`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	c.RunE = o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error {
		if !c.Flags().Changed("price") {
			return runCost(ctx, o, client, nil)
		}
		return runCost(ctx, o, client, &price)
	})
	c.Flags().Float64Var(&price, "price", 0, "What a GPU costs for an hour, in dollars")
	o.AddAllNamespacesFlag(c, "Show the claims of all namespaces, as without -n")
	o.AddOutputFlag(c)
	return c
}

// runCost reads the cluster and prints the report. Without a price it is one without money.
func runCost(ctx context.Context, o *options.Options, client kubernetes.Interface, price *float64) error {
	if err := checkPrice(ptr.Deref(price, 0)); err != nil {
		return err
	}
	m, _, err := fleet.Look(ctx, o, client, fleet.ResourceSlices, fleet.ResourceTaintRules, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourcePods)
	if err != nil {
		return err
	}
	report := NewReport(m, price)
	if only := ptr.Deref(o.Config.Namespace, ""); only != "" && !o.AllNamespaces {
		report.only(only)
	}
	return printer.Print(o, report, report.view())
}

// maxPrice is far more than a GPU costs for an hour.
const maxPrice = 1e6

func checkPrice(price float64) error {
	if !(price >= 0 && price <= maxPrice) {
		return fmt.Errorf("--price %g: it must be dollars for an hour, from 0 to %g", price, float64(maxPrice))
	}
	return nil
}

// only leaves the claims of one namespace.
func (r *Report) only(namespace string) {
	r.Claims = slices.DeleteFunc(r.Claims, func(c Claim) bool { return c.Namespace != namespace })
	r.Idle, r.OutOfUse = nil, nil
	r.Namespaces = slices.DeleteFunc(r.Namespaces, func(n Namespace) bool { return n.Name != namespace })
}

// view returns the report for people.
func (r *Report) view() printer.View {
	var names []string
	for _, c := range r.Claims {
		names = append(names, "resourceclaim.resource.k8s.io/"+c.Name)
	}
	return &printer.Text{Named: names, Render: r.write}
}

func (r *Report) write(w *bytes.Buffer, f printer.Format) (err error) {
	table := func(t *printer.Table) { err = errors.Join(err, t.Render(w, f)) }
	fmt.Fprintf(w, "By %s.\n\n", r.TimeBase)
	if u := r.Fleet; u == nil {
		w.WriteString(r.unknown + ": how the GPUs are used, and what is idle, is unknown.\n")
	} else if table(r.modelTable()); u.Claims > 0 {
		fmt.Fprintf(w, "\nSharing: %d claims on %d GPUs instead of %d, %.0f %% less; %.0f GPU-hours recovered a day.\n",
			u.Claims, u.InUse, u.Unshared, RoundHalfUp(u.SavingPercent, 0), RoundHalfUp(u.RecoveredPerDay, 0))
		if u.PerMonth != nil {
			fmt.Fprintf(w, "In money: $%.0f a month for the GPUs in use, instead of $%.0f.\n", RoundHalfUp(*u.PerMonth, 0), RoundHalfUp(*u.UnsharedMonth, 0))
		}
	}
	if r.Unpublished > 0 {
		fmt.Fprintf(w, "\nOf %d devices that claims have, ResourceSlices are missing: their GPUs are in no line, and what they cost is unknown.\n", r.Unpublished)
	}
	if len(r.Namespaces) > 0 {
		w.WriteString("\n")
		table(r.namespaceTable())
	}
	if f.Wide && len(r.Claims) > 0 {
		w.WriteString("\n")
		table(r.claimTable())
	}
	if r.PricePerGPUHour == nil {
		w.WriteString("\nWithout a price there is no money here. Give one with --price 3.25, dollars for an hour of a GPU.\n")
	}
	return err
}

func (r *Report) modelTable() *printer.Table {
	t := &printer.Table{
		Columns: printer.Columns("GPU", "GPUS", "IN USE", "CLAIMS", "UNSHARED", "SAVING", "RECOVERED GPU-H/DAY", "$/H", "+ROOM FOR SHARES"),
	}
	for _, m := range r.Models {
		t.Rows = append(t.Rows, printer.Row{Cells: m.cells(m.Product)})
	}
	if len(r.Models) > 1 {
		t.Rows = append(t.Rows, printer.Row{Cells: r.Fleet.cells("all"), Style: printer.Bold})
	}
	return t
}

func (u *Usage) cells(name string) []string {
	return []string{
		name, strconv.Itoa(u.GPUs), strconv.Itoa(u.InUse), strconv.Itoa(u.Claims), strconv.Itoa(u.Unshared),
		fmt.Sprintf("%.0f%%", RoundHalfUp(u.SavingPercent, 0)), fmt.Sprintf("%g", RoundHalfUp(u.RecoveredPerDay, 1)), dollars(u.PerHour), strconv.Itoa(u.ShareRoom),
	}
}

func (r *Report) namespaceTable() *printer.Table {
	t := &printer.Table{Columns: printer.Columns("NAMESPACE", "CLAIMS", "GPUS", "UNSHARED", "$/H", "$/H UNSHARED")}
	for _, n := range r.Namespaces {
		t.Rows = append(t.Rows, printer.Row{Cells: append([]string{n.Name, strconv.Itoa(n.Claims)}, n.cells()...)})
	}
	rest := func(name string, p *Part) {
		t.Rows = append(t.Rows, printer.Row{Style: printer.Faint, Cells: []string{name, "", parts(p.GPUs), "", dollars(p.PerHour), ""}})
	}
	if r.Idle != nil {
		rest("(idle: no claim has it)", r.Idle)
	}
	if r.OutOfUse != nil && r.OutOfUse.GPUs > 0 {
		rest("(out of use: no claim can have it)", r.OutOfUse)
	}
	return t
}

func (r *Report) claimTable() *printer.Table {
	t := &printer.Table{Columns: printer.Columns("NAMESPACE", "CLAIM", "DEVICES", "GPUS", "UNSHARED", "$/H", "$/H UNSHARED")}
	for _, c := range r.Claims {
		t.Rows = append(t.Rows, printer.Row{Cells: append([]string{c.Namespace, c.Name, strings.Join(c.Devices, ",")}, c.cells()...)})
	}
	return t
}

func (p *Part) cells() []string {
	return []string{parts(p.GPUs), strconv.Itoa(p.Unshared), dollars(p.PerHour), dollars(p.UnsharedPerHour)}
}

func parts(n float64) string { return fmt.Sprintf("%.2f", RoundHalfUp(n, 2)) }

// dollars writes money, "-" where it is not known.
func dollars(amount *float64) string {
	if amount == nil {
		return printer.Unknown
	}
	return parts(*amount)
}
