// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// Now is when, zero for the time of each look.
	Now time.Time
}

// NewCommand returns kubectl gpu top, with top gpus and top nodes.
func NewCommand(o *options.Options) *cobra.Command {
	f := Flags{SortBy: "name", Scrape: scrape.Options{Timeout: scrape.DefaultTimeout}}
	top := func(use, short string, orders []string, show func(context.Context, *options.Options, kubernetes.Interface, Flags) error) *cobra.Command {
		c := &cobra.Command{
			Use: use, Short: short, Args: cobra.NoArgs,
			RunE: o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error {
				return show(ctx, o, client, f)
			}),
		}
		o.AddTableFlags(c)
		f.Scrape.AddFlags(c.Flags())
		o.AddWatchFlags(c)
		options.AddChoice(c, &f.SortBy, "sort-by", "", "Order: ", orders...)
		return c
	}
	claims := top("top", "Show what claims use of their devices: memory, multiprocessors, and for how long they are idle", slices.Sorted(maps.Keys(orders)), Claimed)
	claims.Long = `Show what claims use of their devices, as the driver on each node measures it: memory used, its limit and
what was asked for, how busy the multiprocessors are, and for how long nothing has run.

It is read from the driver's pods through the API server, with the rights to list pods and to get pods/proxy in its
namespace. A "-" is what is not known or not asked for, never a zero: docs/reference/metrics.md has what GPUs report for which kind of share.`
	claims.Example = `  kubectl gpu top -A --sort-by memory
  kubectl gpu top -w
  kubectl gpu top nodes`
	o.AddSelectionFlags(claims, options.OfClaims)
	gpus := top("gpus", "Show what is used of GPUs", slices.Sorted(maps.Keys(gpuOrders)), showOf(GPUs))
	nodes := top("nodes", "Show what is used of the GPUs of nodes", slices.Sorted(maps.Keys(nodeOrders)), showOf(Nodes))
	for _, c := range []*cobra.Command{gpus, nodes} {
		o.AddSelector(c, options.OfNodes)
		claims.AddCommand(c)
	}
	return claims
}

// showOf shows a list of what was measured of GPUs.
func showOf[T interface {
	Sort(by string)
	Table() *printer.Table
}](list func(*scrape.Result) T,
) func(context.Context, *options.Options, kubernetes.Interface, Flags) error {
	return func(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) error {
		r, err := readGPUs(ctx, o, client, f)
		if err != nil {
			return err
		}
		l := list(r)
		l.Sort(f.SortBy)
		return printer.Print(o, l, l.Table())
	}
}

// Claimed shows what claims use.
func Claimed(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) error {
	m, scope, err := fleet.Look(ctx, o, client, fleet.ResourceClaims, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourceTaintRules, fleet.ResourceNodes)
	if err != nil {
		return err
	}
	r, err := read(ctx, o, client, f)
	if err != nil {
		return err
	}
	if f.Now.IsZero() {
		f.Now = time.Now()
	}
	list := Claims(m, r, scope, f.Now)
	list.Sort(f.SortBy)
	return printer.Print(o, list, list.View(scope.Namespace == ""))
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
	if err != nil || o.Selector == "" {
		return r, err
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: o.Selector})
	if err != nil {
		return nil, fmt.Errorf("-l %s: list nodes: %w", o.Selector, err)
	}
	r.GPUs = slices.DeleteFunc(r.GPUs, func(g scrape.GPU) bool {
		return !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == g.Node })
	})
	return r, nil
}
