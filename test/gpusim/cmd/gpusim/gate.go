// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/state"
)

func faultHeldCommand() *cli.Command {
	return &cli.Command{
		Name:      "held",
		Usage:     "list the calls that faults with --hang keep now, the oldest first",
		ArgsUsage: "[ROOT]",
		Flags:     []cli.Flag{rootFlag()},
		Action: func(_ context.Context, c *cli.Command) error {
			return withState(c, func(f *state.File) error {
				calls, err := f.Held()
				if err != nil {
					return err
				}
				w := tabwriter.NewWriter(c.Root().Writer, 0, 0, 2, ' ', 0)
				fmt.Fprint(w, "FAULT\tFUNCTION\tGPUS\tPID\n")
				for _, h := range calls {
					fmt.Fprintf(w, "%d\t%s\t%s\t%d\n", h.Fault, h.Function, gpuList(h.GPUs), h.PID)
				}
				return w.Flush()
			})
		},
	}
}

func gpuList(gpus []int) string {
	if len(gpus) == 0 {
		return "-"
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(gpus), " ", ","), "[]")
}

func faultLetGoCommand() *cli.Command {
	return &cli.Command{
		Name:        "let-go",
		Usage:       "let the oldest calls go on that a fault keeps",
		ArgsUsage:   "ID [ROOT]",
		Description: "Calls that come later are kept. \"gpusim fault rm\" lets all go on.",
		Flags:       []cli.Flag{rootFlag(), &cli.StringFlag{Name: "calls", Usage: "let `N` calls go on", Value: "1"}},
		Action: func(_ context.Context, c *cli.Command) error {
			args := c.Args().Slice()
			if len(args) == 0 {
				return errors.New("say which fault by its ID")
			}
			id, err := strconv.Atoi(args[0])
			if err != nil || id < 1 {
				return fmt.Errorf("%q is not the ID of a fault, a number that \"gpusim fault list\" shows", args[0])
			}
			calls, err := strconv.Atoi(c.String("calls"))
			if err != nil || calls < 1 {
				return wrong(c, "calls", "a number from 1 on")
			}
			root, err := rootAmong(c, args[1:])
			if err != nil {
				return err
			}
			return withStateIn(root, func(f *state.File) error { return f.LetGo(id, calls) })
		},
	}
}
