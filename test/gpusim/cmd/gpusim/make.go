// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

func newCommand() *cli.Command {
	return &cli.Command{
		Name:      "new",
		Usage:     "make a machine",
		ArgsUsage: "[ROOT]",
		Description: "Makes the root of a machine of the catalogue, with MIG mode off. A root that is\n" +
			"there already becomes the new machine; a folder with other content is refused.\n" +
			"Device nodes are real, so this needs root (CAP_MKNOD).",
		Flags: []cli.Flag{
			rootFlag(), assetsFlag(),
			&cli.StringFlag{Name: "machine", Usage: "`NAME` from \"gpusim machines\", or <board>x<count>", Required: true},
			&cli.Uint64Flag{Name: "seed", Usage: "`NUMBER` that UUIDs, serial numbers and the boot id depend on"},
			&cli.BoolFlag{Name: "moving-minors", Usage: "let GPUs get other minors when their MIG mode changes"},
			&cli.BoolFlag{Name: "upper-half-first", Usage: "number GPU instances as newer drivers do, from the upper half of the memory slices on"},
			&cli.BoolFlag{Name: "driver-container", Usage: "the driver and its device nodes are in ROOT/run/nvidia/driver, as with a driver container of NVIDIA's GPU Operator"},
			&cli.StringFlag{Name: "coherent-memory", Usage: "who manages the memory of GPUs that are coherent with the CPU, such as gh200-96x1: `MODE` driver or numa (default: numa, driver from R615 on)"},
			&cli.StringFlag{Name: "driver-version", Usage: "`VERSION` of the NVIDIA driver (default: 580.95.05)"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			root, err := rootOf(c)
			if err != nil {
				return err
			}
			m, err := catalog.Machine(c.String("machine"), catalog.Options{Seed: c.Uint64("seed"), DriverVersion: c.String("driver-version")})
			if err != nil {
				return err
			}
			m.MovingMinors = c.Bool("moving-minors")
			mode := slices.Index(machine.CoherentModes, c.String("coherent-memory"))
			if mode < 0 {
				return wrong(c, "coherent-memory", "driver or numa")
			}
			m.CoherentMemory = machine.CoherentMemory(mode)
			assets, err := assetsOf(c)
			if err != nil {
				return err
			}
			for i := range m.GPUs {
				if c.Bool("upper-half-first") && m.GPUs[i].MIG != nil {
					m.GPUs[i].MIG.UpperHalfFirst()
				}
			}
			create := sysroot.Create
			if c.Bool("driver-container") {
				create = sysroot.CreateInContainer
			}
			if err := create(root, m, assets); err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.Root().Writer, "%s: %s with %d GPUs, driver %s\n", root, m.Name, len(m.GPUs), m.DriverVersion)
			return err
		},
	}
}

func sysrootCommand() *cli.Command {
	return &cli.Command{
		Name:      "sysroot",
		Usage:     "rewrite the files of a machine",
		ArgsUsage: "[ROOT]",
		Description: "Writes device nodes, libraries and all other files of an existing root again, for\n" +
			"example after the library was rebuilt. The machine, its MIG instances and\n" +
			"processes stay as they are. (\"new\" makes a machine and then does the same.)",
		Flags: []cli.Flag{rootFlag(), assetsFlag()},
		Action: func(_ context.Context, c *cli.Command) error {
			root, err := rootOf(c)
			if err != nil {
				return err
			}
			assets, err := assetsOf(c)
			if err != nil {
				return err
			}
			return sysroot.Renew(root, assets)
		},
	}
}

func rebootCommand() *cli.Command {
	return &cli.Command{
		Name:      "reboot",
		Usage:     "do what a reboot of the machine does",
		ArgsUsage: "[ROOT]",
		Description: "Gives the machine a new boot id and takes its processes and MIG instances away.\n" +
			"The MIG mode is off afterwards, except on Ampere, where it is kept and a pending\n" +
			"change takes effect. Compute modes and time slices are back at their defaults,\n" +
			"GPUs that were lost or needed a reset are well. Faults and latencies stay.",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.BoolFlag{Name: "renumber", Usage: "give GPUs other minors, and the driver other majors, as when drivers are loaded in another order"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			root, err := rootOf(c)
			if err != nil {
				return err
			}
			return sysroot.Reboot(root, sysroot.RebootOptions{Renumber: c.Bool("renumber")})
		},
	}
}

func machinesCommand() *cli.Command {
	return &cli.Command{
		Name:  "machines",
		Usage: "list the machines that can be made",
		Action: func(_ context.Context, c *cli.Command) error {
			list, err := catalog.Machines()
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(c.Root().Writer, 0, 0, 2, ' ', 0)
			for _, m := range list {
				fmt.Fprintf(w, "%s\t%s\n", m.Name, m.Description)
			}
			fmt.Fprint(w, "<board>x<count>\t1 to 16 GPUs of one board, for example l4x8 or a100x16\n")
			return w.Flush()
		},
	}
}

func boardsCommand() *cli.Command {
	return &cli.Command{
		Name:  "boards",
		Usage: "list the boards, and how well their values are known",
		Action: func(_ context.Context, c *cli.Command) error {
			w := tabwriter.NewWriter(c.Root().Writer, 0, 0, 2, ' ', 0)
			fmt.Fprint(w, "BOARD\tPRODUCT\tMEMORY\tMIG PROFILES\tMEASURED\tDOCUMENTED\tASSUMED\n")
			for _, name := range catalog.Boards() {
				b, err := catalog.Load(name)
				if err != nil {
					return err
				}
				profiles := 0
				if b.MIG != nil {
					profiles = len(b.MIG.Profiles)
				}
				n := b.Sources()
				fmt.Fprintf(w, "%s\t%s\t%d MiB\t%d\t%d\t%d\t%d\n", name, b.Product.Name, b.Product.MemoryMiB, profiles,
					n[catalog.Measured], n[catalog.Documented], n[catalog.Assumed])
			}
			return w.Flush()
		},
	}
}
