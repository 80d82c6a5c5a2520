// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// NewCommand returns kubectl gpu tree.
func NewCommand(o *options.Options) *cobra.Command {
	c := &cobra.Command{
		Use:   "tree [NODE...]",
		Short: "Show what every GPU is used for, and what still fits",
		Long: `Show nodes with their GPUs, who has which part of each, and what could be allocated now.

Each GPU has a strip of its memory slices, a letter for each claim. A slice that no partition
has without the one before it is part of that one: the strip of an H100 has seven cells.
What fits is what the scheduler would find for claims that tolerate no taint; one takes the
room of the other. It is unknown where claims or taint rules may not be read.`,
		Example: `  kubectl gpu tree
  kubectl gpu tree node-1 node-2 -o wide
  kubectl gpu tree -l nvidia.com/gpu.product=NVIDIA-H100`,
		RunE: o.Run(func(ctx context.Context, client kubernetes.Interface, args []string) error {
			return Run(ctx, o, client, args)
		}),
	}
	o.AddOutputFlag(c)
	o.AddSelectionFlags(c, options.OfNodes)
	o.AddWatchFlags(c)
	return c
}

// Run reads the cluster and prints the tree.
func Run(ctx context.Context, o *options.Options, client kubernetes.Interface, nodes []string) error {
	m, scope, err := fleet.Look(ctx, o, client, fleet.ResourceSlices, fleet.ResourceClasses, fleet.ResourceTemplates)
	if err != nil {
		return err
	}
	t, err := New(m, nodes, scope.Labels)
	if err != nil {
		return err
	}
	return printer.Print(o, t, View(t))
}
