// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/cluster/internal/boot"
	"github.com/partage-dev/partage/test/cluster/internal/cluster"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

func nodeOption(usage string) cli.Flag { return &cli.StringFlag{Name: nodeFlag, Usage: usage} }

const firstNode = "name of the node (default: the first)"

func powerCommand(turn boot.Turn, usage string) *cli.Command {
	return &cli.Command{
		Name: string(turn), Usage: usage, Flags: []cli.Flag{nodeOption(firstNode)},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			c, err := named(cmd)
			if err != nil {
				return err
			}
			return cluster.Power(ctx, c, cmd.String(nodeFlag), turn)
		},
	}
}

func runCommand() *cli.Command {
	first := 1
	return &cli.Command{
		Name:         "run",
		Usage:        "run a command inside a node, with kubectl, helm and ctr in PATH and KUBECONFIG set",
		ArgsUsage:    "[--] CMD [ARG ...]",
		StopOnNthArg: &first, // flags after the command are the command's
		Flags: []cli.Flag{
			nodeOption(firstNode),
			&cli.BoolFlag{Name: networkFlag, Usage: "enter only the node's network: the command keeps the machine's files and processes"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			args := cmd.Args().Slice()
			if len(args) == 0 {
				return errors.New("run: no command given")
			}
			c, err := named(cmd)
			if err != nil {
				return err
			}
			return cluster.Run(ctx, c, cluster.Where{Node: cmd.String(nodeFlag), NetworkOnly: cmd.Bool(networkFlag)}, args)
		},
	}
}

func loadCommand() *cli.Command {
	return &cli.Command{
		Name:      "load-image",
		Usage:     "import image archives into the running nodes",
		ArgsUsage: "TAR ...",
		Flags:     []cli.Flag{nodeOption("only into this node")},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			c, err := named(cmd)
			if err != nil {
				return err
			}
			if cmd.NArg() == 0 {
				return errors.New("load-image: no archive given")
			}
			for _, archive := range cmd.Args().Slice() {
				if err := cluster.LoadImage(ctx, c, cmd.String(nodeFlag), archive); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func logsCommand() *cli.Command {
	return &cli.Command{
		Name:      "logs",
		Usage:     "print the log of a component of the running or last cluster; without one, name them",
		ArgsUsage: "[COMPONENT]",
		Flags: []cli.Flag{
			nodeOption("name of the component's node, where several have such a component"),
			&cli.IntFlag{Name: "tail", Usage: "print only so many lines from the end"},
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			c, err := named(cmd)
			if err != nil {
				return err
			}
			component := cmd.Args().First()
			if component == "" {
				names, err := cluster.Components(c)
				for _, name := range names {
					fmt.Println(name)
				}
				return err
			}
			log, err := cluster.FindLog(c, cmd.String(nodeFlag), component)
			if err != nil {
				return err
			}
			if cmd.Int("tail") > 0 {
				fmt.Println(service.Tail(log, cmd.Int("tail")))
				return nil
			}
			f, err := os.Open(log)
			if err != nil {
				return fmt.Errorf("read a log: %w", err)
			}
			defer f.Close()
			_, err = io.Copy(os.Stdout, f)
			return err
		},
	}
}
