// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// listCommand lists what a machine has of one kind: as a table, which table writes,
// or in another format.
func listCommand[T any](usage string, table func(w io.Writer, before string, rows []T), rows func(*machine.Machine) []T) *cli.Command {
	return &cli.Command{
		Name:      "list",
		Usage:     usage,
		ArgsUsage: "[ROOT]",
		Flags:     []cli.Flag{rootFlag(), outputFlag()},
		Action: func(_ context.Context, c *cli.Command) error {
			print, err := printer(c, func(out io.Writer, all []T) error {
				w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				table(w, "", all)
				return w.Flush()
			})
			if err != nil {
				return err
			}
			return withState(c, func(f *state.File) error {
				m, err := f.Snapshot()
				if err != nil {
					return err
				}
				return print(c.Root().Writer, append([]T{}, rows(m)...)) // [] in JSON, not null
			})
		},
	}
}
