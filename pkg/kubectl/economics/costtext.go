// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// howToGivePrices is said where no price is known.
const howToGivePrices = `Without prices there is no money here. Give them with --price 3.25, dollars for an hour of any GPU, or with --prices FILE,
a YAML file with a line for each product: "NVIDIA H100*": 3.25`

// costView returns the report for people.
func costView(r *Report, prices Prices) printer.View {
	var names []string
	for _, c := range r.Claims {
		names = append(names, fmt.Sprintf("resourceclaim.resource.k8s.io/%s", c.Name))
	}
	return &printer.Text{Named: names, Render: func(w *bytes.Buffer, f printer.Format) error { return r.write(w, f, prices) }}
}

func (r *Report) write(w *bytes.Buffer, f printer.Format, prices Prices) (err error) {
	table := func(t *printer.Table) { err = errors.Join(err, t.Render(w, f)) }
	fmt.Fprintf(w, "By %s. Where several claims share a device, work is taken to be slower: by %g %% with MPS, by %g %% with time slices.\n\n",
		r.TimeBase, r.Overheads.MPS, r.Overheads.TimeSlice)
	if r.Fleet == nil {
		w.WriteString("Claims of other namespaces cannot be read: how the GPUs are used, and what is idle, is unknown.\n\n")
		table(r.namespaceTable())
	} else if table(r.modelTable()); r.Fleet.Claims > 0 {
		u := r.Fleet
		fmt.Fprintf(w, "\nSharing: %d claims on %d GPUs instead of %d, %.0f %% less; %.0f GPU-hours recovered a day.\n",
			u.Claims, u.InUse, u.Unshared, RoundHalfUp(u.SavingPercent, 0), RoundHalfUp(u.RecoveredPerDay, 0))
		if u.PerMonth != nil {
			fmt.Fprintf(w, "In money: $%.0f a month for the GPUs in use, instead of $%.0f.\n", RoundHalfUp(*u.PerMonth, 0), RoundHalfUp(*u.UnsharedMonth, 0))
		}
		w.WriteString("\n")
		table(r.namespaceTable())
	}
	if f.Wide && len(r.Claims) > 0 {
		w.WriteString("\n")
		table(r.claimTable())
	}
	switch {
	case prices.None():
		w.WriteString("\n" + howToGivePrices + "\n")
	case len(r.WithoutPrice) > 0:
		fmt.Fprintf(w, "\nNo price is given for %s: sums that need one are missing.\n", strings.Join(r.WithoutPrice, ", "))
	}
	return err
}

func (r *Report) modelTable() *printer.Table {
	t := &printer.Table{
		Columns: printer.Columns("GPU", "GPUS", "IN USE", "CLAIMS", "UNSHARED", "SAVING", "RECOVERED GPU-H/DAY", "$/H", "$/CLAIM/H",
			"+ROOM FOR SHARES", "+$/GPU/H"),
		Empty: "No GPUs found.",
	}
	for _, m := range r.Models {
		t.Rows = append(t.Rows, printer.Row{Cells: append(usageCells(m.Product, m.Usage), dollars(m.PerClaim), strconv.Itoa(m.ShareRoom), dollars(m.Price))})
	}
	if len(r.Models) > 1 {
		t.Rows = append(t.Rows, printer.Row{Cells: append(usageCells("all", *r.Fleet), "", "", ""), Style: printer.Bold})
	}
	return t
}

func usageCells(name string, u Usage) []string {
	return []string{
		name, strconv.Itoa(u.GPUs), strconv.Itoa(u.InUse), strconv.Itoa(u.Claims), strconv.Itoa(u.Unshared),
		fmt.Sprintf("%.0f%%", RoundHalfUp(u.SavingPercent, 0)), fmt.Sprintf("%g", RoundHalfUp(u.RecoveredPerDay, 1)), dollars(u.PerHour),
	}
}

func (r *Report) namespaceTable() *printer.Table {
	t := &printer.Table{Columns: printer.Columns("NAMESPACE", "CLAIMS", "GPUS", "UNSHARED", "$/H", "$/H UNSHARED")}
	for _, n := range r.Namespaces {
		t.Rows = append(t.Rows, printer.Row{Cells: []string{
			n.Name, strconv.Itoa(n.Claims), parts(n.GPUs), strconv.Itoa(n.Unshared), dollars(n.PerHour), dollars(n.UnsharedPerHour),
		}})
	}
	if r.Idle != nil {
		t.Rows = append(t.Rows, printer.Row{Style: printer.Faint, Cells: []string{"(idle: no claim has it)", "", parts(r.Idle.GPUs), "", dollars(r.Idle.PerHour), ""}})
	}
	return t
}

func (r *Report) claimTable() *printer.Table {
	t := &printer.Table{Columns: printer.Columns("NAMESPACE", "CLAIM", "DEVICES", "GPUS", "OVERHEAD", "$/H", "$/H UNSHARED")}
	for _, c := range r.Claims {
		t.Rows = append(t.Rows, printer.Row{Cells: []string{
			c.Namespace, c.Name, strings.Join(c.Devices, ","), parts(c.GPUs), fmt.Sprintf("%g%%", c.OverheadPercent), dollars(c.PerHour), dollars(c.UnsharedPerHour),
		}})
	}
	return t
}

func parts(n float64) string { return fmt.Sprintf("%.2f", RoundHalfUp(n, 2)) }

// dollars writes money, "-" where it is not known.
func dollars(amount *float64) string {
	if amount == nil {
		return "-"
	}
	return fmt.Sprintf("%.2f", RoundHalfUp(*amount, 2))
}
