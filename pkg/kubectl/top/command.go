// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Flags are those of the command, beside Options.
type Flags struct {
	Scrape scrape.Options
	SortBy string
}

// NewCommand returns kubectl gpu top, with top gpus and top nodes.
func NewCommand(o *options.Options) *cobra.Command {
	f := Flags{SortBy: "name", Scrape: scrape.Options{Timeout: scrape.DefaultTimeout}}
	top := func(use, short string, show func(context.Context, *options.Options, kubernetes.Interface, Flags) error) *cobra.Command {
		c := &cobra.Command{
			Use: use, Short: short, Args: cobra.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error {
				client, err := o.Client()
				if err != nil {
					return err
				}
				return o.Repeat(c.Context(), func() error { return show(c.Context(), o, client, f) })
			},
		}
		o.AddOutputFlag(c)
		f.Scrape.AddFlags(c.Flags())
		o.AddWatchFlags(c)
		return c
	}
	claims := top("top", "Show what claims use of their devices: memory, multiprocessors, and for how long they are idle", Claimed)
	claims.Long = `Show what claims use of their devices, as the driver on each node measures it: memory used, its limit and
what was asked for, how busy the multiprocessors are, and for how long nothing has run.

It is read from the driver's pods through the API server, with the right to get pods/proxy. A "-" is
what is not known, never a zero: docs/reference/metrics.md has what GPUs report for which kind of share.`
	claims.Example = `  kubectl gpu top -A --sort-by memory
  kubectl gpu top -w
  kubectl gpu top nodes`
	o.AddSelectionFlags(claims)
	claims.Flags().StringVar(&f.SortBy, "sort-by", f.SortBy, "Order: "+strings.Join(Orders(), ", "))
	// The error is that of a flag that does not exist.
	_ = claims.RegisterFlagCompletionFunc("sort-by", cobra.FixedCompletions(Orders(), cobra.ShellCompDirectiveNoFileComp))
	claims.AddCommand(
		top("gpus", "Show what is used of GPUs", func(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) error {
			r, err := readGPUs(ctx, o, client, f)
			if err != nil {
				return err
			}
			list := GPUs(r)
			return printer.Print(o, list, list.Table())
		}),
		top("nodes", "Show what is used of the GPUs of nodes", func(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) error {
			r, err := readGPUs(ctx, o, client, f)
			if err != nil {
				return err
			}
			list := Nodes(r)
			return printer.Print(o, list, list.Table())
		}),
	)
	return claims
}

// Claimed shows what claims use.
func Claimed(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) error {
	selector, err := labels.Parse(o.Selector)
	if err != nil {
		return fmt.Errorf("-l %s: it must be a label selector of claims, such as app=llm: %w", o.Selector, err)
	}
	if err := (&ClaimUsageList{}).Sort(f.SortBy); err != nil {
		return err
	}
	namespace, err := o.Namespace()
	if err != nil {
		return err
	}
	snapshot, err := fleet.Read(ctx, client, namespace)
	if err != nil {
		return err
	}
	if err := snapshot.Need(namespace, fleet.ResourceClaims); err != nil {
		return err
	}
	snapshot.Warn(o.ErrOut, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourceTaintRules, fleet.ResourceNodes)
	r, err := read(ctx, o, client, f)
	if err != nil {
		return err
	}
	list := Claims(fleet.New(snapshot, o.Driver), r, namespace, selector)
	if err := list.Sort(f.SortBy); err != nil {
		return err
	}
	return printer.Print(o, list, list.Table(namespace == ""))
}

func read(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) (*scrape.Result, error) {
	r, err := scrape.Pods(ctx, client, f.Scrape)
	if err != nil {
		return nil, err
	}
	r.Warn(o.ErrOut)
	return r, nil
}

// readGPUs is read for what has no other source: it fails where the driver's pods tell nothing. While
// somebody watches, they may answer next time.
func readGPUs(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) (*scrape.Result, error) {
	r, err := read(ctx, o, client, f)
	if err == nil && !o.Watch {
		err = r.Silence()
	}
	return r, err
}
