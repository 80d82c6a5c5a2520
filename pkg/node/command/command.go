// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package command is what the commands have in common: how they start and end, how
// they report errors, and the flags for logging and health.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/urfave/cli/v3"
	"k8s.io/component-base/logs"

	"github.com/partage-dev/partage/pkg/util/version"
)

// Run runs a command until it ends or a signal asks it to, and returns the exit code
// of the process: 1 after an error, unless that is a cli.ExitCoder. A second signal ends
// the process at once. Errors go to the command's ErrWriter, in one line.
func Run(cmd *cli.Command, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	defer logs.FlushLogs()

	complete(cmd)
	if err := cmd.Run(ctx, args); err != nil {
		logs.FlushLogs()
		// Several wrong flags are several errors, still one line.
		_, _ = fmt.Fprintf(cmd.ErrWriter, "%s: %s\n", cmd.Name, strings.ReplaceAll(err.Error(), "\n", "; "))
		if coder := cli.ExitCoder(nil); errors.As(err, &coder) {
			return coder.ExitCode()
		}
		return 1
	}
	return 0
}

// complete adds the version sub-command and what makes a usage error one line and not
// a page of help.
func complete(cmd *cli.Command) {
	cmd.HideVersion = true // -v is the log verbosity
	cmd.ExitErrHandler = func(context.Context, *cli.Command, error) {}
	cmd.Commands = append(cmd.Commands, versionCommand(cmd.Writer))
	for _, c := range slices.Concat(cmd.Commands, []*cli.Command{cmd}) {
		if c.OnUsageError != nil {
			continue
		}
		c.OnUsageError = func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err }
	}
}

func versionCommand(out io.Writer) *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "print the version",
		Action: NoArguments(func(context.Context, *cli.Command) error {
			_, err := fmt.Fprintln(out, version.Get())
			return err
		}),
	}
}

// NoArguments refuses arguments that are not flags.
func NoArguments(action cli.ActionFunc) cli.ActionFunc {
	return func(ctx context.Context, cmd *cli.Command) error {
		if !cmd.Args().Present() {
			return action(ctx, cmd)
		}
		if cmd.Root() != cmd {
			return fmt.Errorf("%s takes no argument, got %q", cmd.Name, cmd.Args().First())
		}
		var names []string
		for _, c := range cmd.VisibleCommands() {
			if c.Name != "help" {
				names = append(names, c.Name)
			}
		}
		return fmt.Errorf("unknown command %q, there are: %s", cmd.Args().First(), strings.Join(names, ", "))
	}
}
