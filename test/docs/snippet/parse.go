// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package snippet

import (
	"context"
	"fmt"
	"slices"

	"github.com/urfave/cli/v3"
)

// Accept runs a program's own parser over arguments, without what the commands do. It returns
// what is wrong with them: a sub-command or flag that does not exist, or a value that is none.
func Accept(program *cli.Command, args []string) error {
	disarm(program)
	if err := program.Run(context.Background(), args); err != nil {
		return fmt.Errorf("%s: %w", program.Name, err)
	}
	return nil
}

// disarm makes every command of a program do nothing but look at its arguments.
func disarm(cmd *cli.Command) {
	cmd.Before, cmd.After = nil, nil
	cmd.ExitErrHandler = func(context.Context, *cli.Command, error) {}
	cmd.OnUsageError = func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err }
	cmd.Action = func(_ context.Context, cmd *cli.Command) error {
		if cmd.Args().Present() && !cmd.SkipFlagParsing {
			return fmt.Errorf("%s takes no argument %q", cmd.Name, cmd.Args().First())
		}
		return nil
	}
	for _, sub := range slices.Clone(cmd.Commands) {
		disarm(sub)
	}
}
