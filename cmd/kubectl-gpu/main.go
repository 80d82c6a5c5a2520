// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpu shows what the GPUs of a cluster are used for, and explains why pods
// that want some wait. As a plugin of kubectl it is called kubectl gpu.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/advise"
	"github.com/partage-dev/partage/pkg/kubectl/cost"
	"github.com/partage-dev/partage/pkg/kubectl/explain"
	"github.com/partage-dev/partage/pkg/kubectl/migrate"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/tree"
	"github.com/partage-dev/partage/pkg/version"
)

// exitFound is the exit code of a command that worked and found something wrong.
const exitFound = 2

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newCommand(genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}).ExecuteContext(ctx)
	stop()
	switch {
	case err == nil:
	case errors.Is(err, options.ErrFound):
		os.Exit(exitFound)
	default:
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func newCommand(streams genericiooptions.IOStreams) *cobra.Command {
	o := options.New(streams)
	root := &cobra.Command{
		Use:           "kubectl-gpu",
		Short:         "See GPUs and what they are used for, ask why a pod waits, choose how to share",
		Version:       version.Get().String(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
	}
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	root.SetIn(streams.In)
	o.AddFlags(root.PersistentFlags())
	// In the order of the alphabet.
	root.AddCommand(
		advise.NewCommand(o),
		cost.NewCommand(o),
		explain.NewCommand(o),
		migrate.NewCommand(o),
		tree.NewCommand(o),
	)
	return root
}
