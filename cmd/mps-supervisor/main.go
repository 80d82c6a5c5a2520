// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command mps-supervisor runs on every GPU node: it starts and supervises the MPS
// control daemons of the claims there. The same program is the container hook that
// refuses containers which would run without the limits of their devices.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/cdi/hook"
	"github.com/partage-dev/partage/pkg/command"
	"github.com/partage-dev/partage/pkg/mps/supervisor"
)

const name = "mps-supervisor"

func main() {
	os.Exit(run(os.Args, os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return command.Run(newCommand(stdin, stdout, stderr), args)
}

func newCommand(stdin io.Reader, stdout, stderr io.Writer) *cli.Command {
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
			containerHook(stdin),
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

func containerHook(stdin io.Reader) *cli.Command {
	var control, session string
	var softwareLimits bool
	return &cli.Command{
		Name:  hook.Command,
		Usage: "refuse a container that would run without the limits of its devices; an OCI hook, which reads the container's state",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: hook.ControlFlag, Destination: &control, Usage: "path of the MPS control daemon's socket on the host"},
			&cli.StringFlag{Name: hook.SessionFlag, Destination: &session, Usage: "name of the MPS session, for messages"},
			&cli.BoolFlag{Name: hook.SoftwareLimitsFlag, Destination: &softwareLimits, Usage: "an interposer library limits the container"},
		},
		Action: command.NoArguments(func(ctx context.Context, _ *cli.Command) error {
			switch mps := control != "" && session != ""; {
			case mps && !softwareLimits:
				return hook.CheckMPSClient(ctx, stdin, control, session)
			case softwareLimits && control == "" && session == "":
				return hook.CheckSoftwareLimits(stdin)
			}
			return fmt.Errorf("%s: want --%s and --%s, or --%s", hook.Command, hook.ControlFlag, hook.SessionFlag, hook.SoftwareLimitsFlag)
		}),
	}
}
