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
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

const (
	exitFailed = 1
	// exitFound is the exit code of a command that worked and found something wrong.
	exitFound = 2
)

// completer is the name under which kubectl looks for a program that completes the arguments of
// kubectl gpu. A link of that name to this program is one.
const completer = "kubectl_complete-gpu"

func main() {
	os.Exit(run(os.Args, genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}))
}

// run runs the program with its own name and its arguments, and returns its exit code.
func run(args []string, streams genericiooptions.IOStreams) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	streams.Out, streams.ErrOut = options.Safe(streams.Out), options.Safe(streams.ErrOut)
	root := newCommand(streams)
	root.SetArgs(arguments(args))
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, options.ErrFound):
		return exitFound
	}
	fmt.Fprintln(streams.ErrOut, "error:", err)
	return exitFailed
}

// arguments returns the arguments of the command tree.
func arguments(args []string) []string {
	if strings.TrimSuffix(filepath.Base(args[0]), ".exe") == completer {
		return append([]string{cobra.ShellCompRequestCmd}, args[1:]...)
	}
	return args[1:]
}
