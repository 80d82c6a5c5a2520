// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/completion"
	"github.com/partage-dev/partage/pkg/kubectl/cordon"
	"github.com/partage-dev/partage/pkg/kubectl/doctor"
	"github.com/partage-dev/partage/pkg/kubectl/economics"
	"github.com/partage-dev/partage/pkg/kubectl/explain"
	"github.com/partage-dev/partage/pkg/kubectl/idle"
	"github.com/partage-dev/partage/pkg/kubectl/migrate"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/rightsize"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset"
	"github.com/partage-dev/partage/pkg/kubectl/top"
	"github.com/partage-dev/partage/pkg/kubectl/tree"
	"github.com/partage-dev/partage/pkg/kubectl/ui"
	"github.com/partage-dev/partage/pkg/util/version"
)

// group is a section of the list of commands.
type group struct {
	id, title string
	commands  []entry
}

// entry is a command and what completes its arguments.
type entry struct {
	make func(*options.Options) *cobra.Command
	args func(*options.Options) cobra.CompletionFunc
}

// groups are all commands. Within a group they are listed by name.
func groups() []group {
	return []group{
		{"see", "See what GPUs are used for:", []entry{
			{tree.NewCommand, completion.Nodes},
			{top.NewCommand, nil},
			{idle.NewCommand, nil},
			{ui.NewCommand, nil},
		}},
		{"ask", "Ask why something does not work:", []entry{
			{doctor.NewCommand, nil},
			{explain.NewCommand, completion.PodsAndClaims},
		}},
		{"choose", "Choose how to share:", []entry{
			{economics.NewAdvise, nil},
			{economics.NewCost, nil},
			{migrate.NewCommand, nil},
			{rightsize.NewCommand, nil},
			{sliceset.NewCommand, nil},
		}},
		{"keep", "Keep pods away from a GPU, the only commands that write:", []entry{
			{cordon.NewCommand, completion.GPUs},
			{cordon.NewUncordonCommand, completion.GPUs},
		}},
	}
}

// shownFlags are those of all commands that help lists: kubectl options has the others.
var shownFlags = []string{"context", "driver", "kubeconfig", "namespace"}

// newCommand returns the command tree.
func newCommand(streams genericiooptions.IOStreams) *cobra.Command {
	o := options.New(streams)
	root := &cobra.Command{
		Use:   "kubectl-gpu",
		Short: "See GPUs and what they are used for, ask why a pod waits, choose how to share",
		Long: `See GPUs and what they are used for, ask why a pod waits, choose how to share.

All commands but cordon and uncordon only read. They have the rights that you have; where one is
missing, they name it and say what is unknown without it. The flags of kubectl options that
choose cluster and user work here, too.

Exit codes: 0 done, and nothing is wrong; 1 the command failed; 2 it worked and found something:
a claim that cannot be allocated, a claim that is idle, a finding of doctor.`,
		Version:       version.Get().String(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
		// Its scripts would complete kubectl-gpu; for kubectl gpu there is the name completer.
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	root.SetIn(streams.In)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, c.CommandPath())
	})
	o.AddFlags(root.PersistentFlags())
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(shownFlags, f.Name) })
	for _, g := range groups() {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, e := range g.commands {
			c := e.make(o)
			c.GroupID = g.id
			if e.args != nil && c.ValidArgsFunction == nil {
				c.ValidArgsFunction = e.args(o)
			}
			root.AddCommand(c)
		}
	}
	root.AddCommand(&cobra.Command{
		Use: "version", Short: "Print the version", Long: "Print the version of this program.", Example: "  kubectl gpu version", Args: cobra.NoArgs,
		Run: func(*cobra.Command, []string) { fmt.Fprintln(o.Out, root.Version) },
	})
	completion.AddFlags(root, o)
	return root
}
