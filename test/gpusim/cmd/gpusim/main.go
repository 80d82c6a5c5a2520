// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command gpusim makes simulated GPU machines and changes them from outside, as
// their hardware and operator would.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := app(os.Stdout).Run(ctx, os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "gpusim:", err)
		stop()
		os.Exit(1)
	}
}

const description = `A simulated machine is a folder, its root: "new" makes one with device nodes, the
parts of /proc and /sys that concern GPUs, the driver's libraries, nvidia-smi and MPS.
Whatever loads ROOT/usr/lib/<triplet>/libnvidia-ml.so.1 is on that machine; all
processes share one state, in ROOT/var/lib/gpusim/state.

Commands that work on a machine find its root by --root or GPUSIM_ROOT.

   gpusim new --machine dgx-h100 --root /tmp/node1
   /tmp/node1/usr/bin/nvidia-smi -L
   gpusim show --root /tmp/node1`

// app is the command line. Output goes to out; errors are returned.
func app(out io.Writer) *cli.Command {
	return &cli.Command{
		Name:        "gpusim",
		Usage:       "simulated GPU machines",
		Description: description,
		Writer:      out,
		ErrWriter:   out,
		// Errors are for main to print.
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		OnUsageError:   func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err },
		Commands: []*cli.Command{
			newCommand(), sysrootCommand(), showCommand(), rebootCommand(), processCommand(),
			mpsCommand(), faultCommand(), latencyCommand(), gpuCommand(), xidCommand(), resetCommand(), machinesCommand(), boardsCommand(),
		},
		Action: func(_ context.Context, c *cli.Command) error {
			if c.Args().Present() {
				return fmt.Errorf("there is no command %q, see gpusim --help", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
	}
}

func rootFlag() cli.Flag {
	return &cli.StringFlag{Name: "root", Usage: "the machine's root `DIR`", Sources: cli.EnvVars("GPUSIM_ROOT"), TakesFile: true}
}

func assetsFlag() cli.Flag {
	return &cli.StringFlag{
		Name:    "assets",
		Usage:   "`DIR` of the built files (lib/libnvidia-ml.so, lib/libcuda.so, bin/nvidia-smi and those of MPS); default: _output/gpusim beside the folder of this program",
		Sources: cli.EnvVars("GPUSIM_ASSETS"), TakesFile: true,
	}
}

// rootOf is the root that the user named, by flag, environment or argument.
func rootOf(c *cli.Command) (string, error) { return rootAmong(c, c.Args().Slice()) }

// rootAmong is rootOf where only some arguments may be a root.
func rootAmong(c *cli.Command, args []string) (string, error) {
	root := c.String("root")
	switch {
	case len(args) > 1:
		return "", fmt.Errorf("one root at a time, got %q", args)
	case len(args) == 1 && c.IsSet("root") && args[0] != root && os.Getenv("GPUSIM_ROOT") != root:
		return "", fmt.Errorf("--root says %s, the argument %s", root, args[0])
	case len(args) == 1:
		root = args[0]
	}
	if root == "" {
		return "", errors.New("which machine? Say it by --root DIR or GPUSIM_ROOT")
	}
	return root, nil
}

func assetsOf(c *cli.Command) (sysroot.Assets, error) {
	dir := c.String("assets")
	if dir == "" {
		self, err := os.Executable()
		if err != nil {
			return sysroot.Assets{}, fmt.Errorf("find the built files: %w", err)
		}
		dir = filepath.Join(filepath.Dir(self), "..", "_output", "gpusim")
	}
	a, err := sysroot.AssetsIn(dir)
	if err != nil {
		return a, fmt.Errorf("%w (build them, or say where they are by --assets)", err)
	}
	return a, nil
}

// withState opens the state of the machine that the user named.
func withState(c *cli.Command, use func(*state.File) error) error {
	root, err := rootOf(c)
	if err != nil {
		return err
	}
	return withStateIn(root, use)
}

func withStateIn(root string, use func(*state.File) error) error {
	f, err := state.Open(sysroot.StatePath(root))
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("there is no simulated machine in %s: make one with \"gpusim new\"", root)
	}
	if err != nil {
		return fmt.Errorf("machine in %s: %w", root, err)
	}
	defer f.Close()
	return use(f)
}
