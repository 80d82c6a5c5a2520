// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command gpu-kubelet-plugin runs on every GPU node: it publishes what the GPUs
// could be, and prepares and unprepares the claims of pods.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"
	"k8s.io/component-base/logs"

	"github.com/partage-dev/partage/pkg/version"
)

const name = "gpu-kubelet-plugin"

func main() {
	os.Exit(run(os.Args, os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	defer logs.FlushLogs()

	if err := newCommand(stdout, stderr).Run(ctx, args); err != nil {
		logs.FlushLogs()
		// Several wrong flags are several errors, still one line.
		_, _ = fmt.Fprintf(stderr, "%s: %s\n", name, strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}

func newCommand(stdout, stderr io.Writer) *cli.Command {
	c := &config{}
	// A usage error is one line, not a page of help.
	plain := func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err }
	return &cli.Command{
		Name:           name,
		Usage:          "DRA driver for NVIDIA GPUs: the part that runs on every node",
		Writer:         stdout,
		ErrWriter:      stderr,
		HideVersion:    true, // -v is the log verbosity
		Flags:          c.flags(),
		OnUsageError:   plain,
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Present() {
				return fmt.Errorf("unknown command %q, there are: slices, version", cmd.Args().First())
			}
			return serve(ctx, c, cmd)
		},
		Commands: []*cli.Command{
			{
				Name:         "slices",
				Usage:        "print as YAML what this machine would publish; talks to no cluster",
				Flags:        c.slicesFlags(),
				OnUsageError: plain,
				Action: func(ctx context.Context, cmd *cli.Command) error {
					if cmd.Args().Present() {
						return fmt.Errorf("slices takes no argument, got %q", cmd.Args().First())
					}
					return printSlices(ctx, c, stdout)
				},
			},
			{
				Name:         "version",
				Usage:        "print the version",
				OnUsageError: plain,
				Action: func(context.Context, *cli.Command) error {
					_, err := fmt.Fprintln(stdout, version.Get())
					return err
				},
			},
		},
	}
}
