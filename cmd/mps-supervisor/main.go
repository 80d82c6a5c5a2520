// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command mps-supervisor runs on every GPU node: it starts and looks after the MPS
// control daemons of the claims there. The same program is the hook by which
// containers make sure that they reach their daemon.
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

	"github.com/partage-dev/partage/pkg/cdi/hook"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/version"
)

const name = "mps-supervisor"

func main() {
	os.Exit(run(os.Args, os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	defer logs.FlushLogs()

	if err := newCommand(stdin, stdout, stderr).Run(ctx, args); err != nil {
		logs.FlushLogs()
		// Several wrong flags are several errors, still one line.
		_, _ = fmt.Fprintf(stderr, "%s: %s\n", name, strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}

func newCommand(stdin io.Reader, stdout, stderr io.Writer) *cli.Command {
	c := &config{}
	// A usage error is one line, not a page of help.
	plain := func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err }
	return &cli.Command{
		Name:           name,
		Usage:          "runs MPS control daemons for the DRA driver for NVIDIA GPUs",
		Writer:         stdout,
		ErrWriter:      stderr,
		HideVersion:    true, // -v is the log verbosity
		Flags:          c.flags(),
		OnUsageError:   plain,
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			if cmd.Args().Present() {
				return fmt.Errorf("unknown command %q, there are: %s, version", cmd.Args().First(), hook.Command)
			}
			return serve(ctx, c, cmd)
		},
		Commands: []*cli.Command{
			containerHook(stdin, plain),
			{
				Name:            mps.LaunchCommand,
				Usage:           "become a program of the driver; for the supervisor itself",
				Hidden:          true,
				SkipFlagParsing: true,
				Action: func(_ context.Context, cmd *cli.Command) error {
					return mps.Launch(cmd.Args().Slice())
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

func containerHook(stdin io.Reader, plain cli.OnUsageErrorFunc) *cli.Command {
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
		OnUsageError: plain,
		Action: func(ctx context.Context, _ *cli.Command) error {
			switch mps := control != "" && session != ""; {
			case mps && !softwareLimits:
				return hook.CheckMPSClient(ctx, stdin, control, session)
			case softwareLimits && control == "" && session == "":
				return hook.CheckSoftwareLimits(stdin)
			}
			return fmt.Errorf("%s: want --%s and --%s, or --%s", hook.Command, hook.ControlFlag, hook.SessionFlag, hook.SoftwareLimitsFlag)
		},
	}
}
