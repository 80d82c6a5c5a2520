// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"
)

// socketFlag is where two programs meet, which may be in different pods.
var socketFlag = &cli.StringFlag{Name: "socket", Usage: "Unix socket at this `PATH`", Required: true}

func passCommand() *cli.Command {
	return &cli.Command{
		Name:      "pass",
		Usage:     "send an open file to the program that takes it",
		ArgsUsage: "FILE",
		Flags:     []cli.Flag{socketFlag},
		Action: func(_ context.Context, c *cli.Command) error {
			fd, err := unix.Open(c.Args().First(), unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("open %s: %w", c.Args().First(), err)
			}
			to, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: c.String("socket")})
			if err != nil {
				return err
			}
			defer func() { _ = to.Close() }()
			if _, _, err := to.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil); err != nil {
				return err
			}
			fmt.Fprintln(c.Root().Writer, "passed")
			return nil
		},
	}
}

func takeCommand() *cli.Command {
	return &cli.Command{
		Name:  "take",
		Usage: "take an open file and keep it until SIGTERM",
		Flags: []cli.Flag{socketFlag},
		Action: func(ctx context.Context, c *cli.Command) error {
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.String("socket")})
			if err != nil {
				return err
			}
			fmt.Fprintln(c.Root().Writer, "ready")
			from, err := listener.AcceptUnix()
			if err != nil {
				return err
			}
			rights := make([]byte, unix.CmsgSpace(4))
			if _, _, _, _, err := from.ReadMsgUnix(make([]byte, 1), rights); err != nil {
				return err
			}
			entries, err := os.ReadDir("/proc/self/fd")
			if err != nil {
				return err
			}
			fmt.Fprintln(c.Root().Writer, "taken,", len(entries), "files are open")
			<-ctx.Done()
			return nil
		},
	}
}
