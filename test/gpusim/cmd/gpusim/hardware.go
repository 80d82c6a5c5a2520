// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

func latencyCommand() *cli.Command {
	return &cli.Command{
		Name:      "latency",
		Usage:     "set how long NVML calls take",
		ArgsUsage: "PROFILE [ROOT]",
		Description: "The profiles are zero (what a new machine has), hopper, ampere and dense. They are\n" +
			"models, not measurements: the proportions between calls are plausible. Calls that\n" +
			"change the same GPU wait for each other, as on a driver's lock.",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "scale", Usage: "multiply all times by `X`", Value: "1"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			profiles, err := catalog.LatencyProfiles()
			if err != nil {
				return err
			}
			if !c.Args().Present() {
				var names []string
				for _, p := range profiles {
					names = append(names, p.Name)
				}
				return errors.New("say which profile: " + strings.Join(names, ", "))
			}
			scale, err := strconv.ParseFloat(c.String("scale"), 64)
			if err != nil {
				return wrong(c, "scale", "a number, such as 0.1")
			}
			latencies, err := catalog.Latencies(c.Args().First(), scale)
			if err != nil {
				return err
			}
			root, err := rootAmong(c, c.Args().Tail())
			if err != nil {
				return err
			}
			return withStateIn(root, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error {
					m.Latencies = latencies
					return nil
				})
			})
		},
	}
}
