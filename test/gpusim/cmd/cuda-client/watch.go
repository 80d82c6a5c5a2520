// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

func watchCommand() *cli.Command {
	return &cli.Command{
		Name:  "watch",
		Usage: "keep device nodes open until SIGTERM, as a monitoring agent does",
		Description: "Prints \"ready\" when it does. NVML does not list such a program, and what it has open\n" +
			"cannot be destroyed or change its MIG mode. It takes part in no MPS.",
		Flags: []cli.Flag{&cli.IntFlag{Name: "device", Usage: "`N`umber of the device among all that can be seen (default: all)", Value: -1}},
		Action: func(ctx context.Context, c *cli.Command) error {
			at, err := state.Find()
			if err != nil {
				return fmt.Errorf("%w (%w)", cuda.NoDevice, err)
			}
			f, err := state.Open(at.State)
			if err != nil {
				return fmt.Errorf("%w (%w)", cuda.NoDevice, err)
			}
			defer f.Close()
			if err := f.OpenDriver(); err != nil {
				return err
			}
			m, err := f.Snapshot()
			if err != nil {
				return err
			}
			devices, err := watched(c, cuda.Here(m, at.Root))
			if err != nil {
				return err
			}
			nodes, err := cuda.Open(at.Root, devices...)
			if err != nil {
				return err
			}
			defer func() { _ = nodes.Close() }()
			for _, d := range devices {
				p := machine.Process{GPU: d.GPU, InstanceID: d.Instance, ComputeID: d.Compute, Kind: machine.Handle}
				if _, err := f.Hold(p); err != nil {
					return err
				}
			}
			fmt.Fprintln(c.Root().Writer, "ready")
			<-ctx.Done()
			return nil
		},
	}
}

// watched are the devices whose nodes are kept open.
func watched(c *cli.Command, here []cuda.Device) ([]cuda.Device, error) {
	n := c.Int("device")
	switch {
	case len(here) == 0:
		return nil, cuda.NoDevice
	case n < 0:
		return here, nil
	case n >= len(here):
		return nil, cuda.InvalidDevice
	}
	return here[n : n+1], nil
}
