// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command gpu-kubelet-plugin runs on every GPU node: it publishes what the GPUs
// could be, and prepares and unprepares the claims of pods.
package main

import (
	"context"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/node/command"
)

const name = "gpu-kubelet-plugin"

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
		Usage:     "DRA driver for NVIDIA GPUs: the part that runs on every node",
		Writer:    stdout,
		ErrWriter: stderr,
		Flags:     c.flags(),
		Action: command.NoArguments(func(ctx context.Context, cmd *cli.Command) error {
			return serve(ctx, c, cmd)
		}),
		Commands: []*cli.Command{{
			Name:  "slices",
			Usage: "print as YAML what this machine would publish; talks to no cluster",
			Flags: c.slicesFlags(),
			Action: command.NoArguments(func(ctx context.Context, _ *cli.Command) error {
				return printSlices(ctx, c, stdout)
			}),
		}, claimsInUseCommand(c, stdout), doctorCommand(c, stdout), conformanceCommand(c, stdout), launchCommand()},
	}
}
