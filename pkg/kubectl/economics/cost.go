// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

const costLong = `Show what workloads cost on the GPUs of the cluster, and what sharing saves.

It goes by what claims have now, as if it stayed so; it knows no history. A GPU in use is paid
by the claims on it, each by its part of memory or multiprocessors, whichever is more, or of
the shares. What no claim has is a line of its own, so that the lines add up. Nothing knows what your GPUs cost: without a price the
command speaks of GPUs and hours only.

-n shows the claims of one namespace; the GPUs are always those of the whole cluster.`

const costExample = `  kubectl gpu cost
  kubectl gpu cost --price 3.25 -o wide

  # A price for each product; the first line that matches counts
  cat >prices.yaml <<'EOF'
  "NVIDIA H100*": 3.25
  "Tesla T4": 0.35
  EOF
  kubectl gpu cost --prices prices.yaml`

// costFlags are those of the command.
type costFlags struct {
	file      string
	price     float64
	overheads Overheads
}

// NewCost returns the command.
func NewCost(o *options.Options) *cobra.Command {
	f := &costFlags{overheads: DefaultOverheads()}
	c := &cobra.Command{
		Use:               "cost",
		Short:             "Show what workloads cost, and what sharing saves",
		Long:              costLong,
		Example:           costExample,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			prices, err := f.prices(c.Flags().Changed("price"))
			if err != nil {
				return err
			}
			client, err := o.Client()
			if err != nil {
				return err
			}
			return runCost(c.Context(), o, client, prices, f.overheads)
		},
	}
	s := c.Flags()
	s.StringVar(&f.file, "prices", "", "YAML file with the price of each product for an hour, such as \"NVIDIA H100*\": 3.25")
	s.Float64Var(&f.price, "price", 0, "Price of every GPU for an hour, in dollars")
	s.Float64Var(&f.overheads.MPS, "overhead-mps", f.overheads.MPS, "By how many percent MPS slows work on a device that several claims share")
	s.Float64Var(&f.overheads.TimeSlice, "overhead-time-slice", f.overheads.TimeSlice, "The same for time slices")
	o.AddOutputFlag(c)
	return c
}

// runCost reads the cluster and prints the report.
func runCost(ctx context.Context, o *options.Options, client kubernetes.Interface, prices Prices, overheads Overheads) error {
	m, _, err := fleet.Look(ctx, o, client, fleet.ResourceSlices, fleet.ResourceNodes, fleet.ResourceTaintRules, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourcePods)
	if err != nil {
		return err
	}
	report := NewReport(m, prices, overheads)
	if only := ptr.Deref(o.Config.Namespace, ""); only != "" {
		report.only(only)
	}
	return printer.Print(o, report, costView(report, prices))
}

// only leaves the claims of one namespace.
func (r *Report) only(namespace string) {
	r.Claims = slices.DeleteFunc(r.Claims, func(c Claim) bool { return c.Namespace != namespace })
	r.Idle = nil
	r.Namespaces = slices.DeleteFunc(r.Namespaces, func(n Namespace) bool { return n.Name != namespace })
}

// prices reads the costFlags about money.
func (f *costFlags) prices(hasPrice bool) (Prices, error) {
	for name, percent := range map[string]float64{"overhead-mps": f.overheads.MPS, "overhead-time-slice": f.overheads.TimeSlice} {
		if !(percent >= 0 && percent <= 1000) {
			return Prices{}, fmt.Errorf("--%s %g: it must be a percentage from 0 to 1000", name, percent)
		}
	}
	switch {
	case hasPrice && f.file != "":
		return Prices{}, errors.New("--price is for all GPUs and --prices for each product: give one of them")
	case hasPrice && (math.IsNaN(f.price) || f.price < 0 || f.price > maxPrice):
		return Prices{}, fmt.Errorf("--price %g: it must be dollars for an hour, from 0 to %g", f.price, float64(maxPrice))
	case hasPrice:
		return Flat(f.price), nil
	case f.file == "":
		return Prices{}, nil
	}
	data, err := os.ReadFile(f.file)
	if err != nil {
		return Prices{}, fmt.Errorf("read the prices: %w", err)
	}
	prices, err := DecodePrices(data)
	if err != nil {
		return Prices{}, fmt.Errorf("read the prices of %s: %w", f.file, err)
	}
	return prices, nil
}
