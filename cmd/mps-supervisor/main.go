// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command mps-supervisor runs on every GPU node: it starts and supervises the MPS
// control daemons of the claims there.
package main

import (
	"context"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/node/command"
)

const name = "mps-supervisor"

func main() {
	os.Exit(run(os.Args, os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	return command.Run(newCommand(stdout, stderr), args)
}

func newCommand(stdout, stderr io.Writer) *cli.Command {
	c := &config{}
	return &cli.Command{
		Name:      name,
		Usage:     "runs MPS control daemons for the DRA driver for NVIDIA GPUs",
		Writer:    stdout,
		ErrWriter: stderr,
		Flags:     c.flags(),
		Action: command.NoArguments(func(ctx context.Context, cmd *cli.Command) error {
			return serve(ctx, c, cmd)
		}),
		Commands: []*cli.Command{
			{
				Name:            supervisor.LaunchCommand,
				Usage:           "become a program of the driver; for the supervisor itself",
				Hidden:          true,
				SkipFlagParsing: true,
				Action: func(_ context.Context, cmd *cli.Command) error {
					return supervisor.Launch(cmd.Args().Slice())
				},
			},
		},
	}
}
