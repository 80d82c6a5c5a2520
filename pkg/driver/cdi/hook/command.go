// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/partage-dev/partage/pkg/util/quote"
)

const commands = MPSClientCommand + ", " + SoftwareLimitsCommand + ", " + MemoryLimitCommand

// Run does what the arguments after the program's name ask for. input is what the
// runtime writes to hooks. An error means that the container must not start.
func Run(ctx context.Context, args []string, input io.Reader) error {
	if len(args) == 0 {
		return errors.New("no command is given: want one of " + commands)
	}
	name, args := args[0], args[1:]
	switch name {
	case MPSClientCommand:
		return runMPSClient(ctx, args, input)
	case SoftwareLimitsCommand:
		if err := parse(newFlags(name), args); err != nil {
			return err
		}
		return CheckSoftwareLimits(input)
	case MemoryLimitCommand:
		return runMemoryLimit(ctx, args, input)
	}
	return fmt.Errorf("unknown command %s: want one of %s", quote.Text(name), commands)
}

func runMPSClient(ctx context.Context, args []string, input io.Reader) error {
	flags := newFlags(MPSClientCommand)
	control := flags.String(ControlFlag, "", "path of the MPS control daemon's socket on the host")
	session := flags.String(SessionFlag, "", "name of the MPS session, for messages")
	if err := parse(flags, args); err != nil {
		return err
	}
	if *control == "" || *session == "" {
		return fmt.Errorf("%s: want --%s and --%s", MPSClientCommand, ControlFlag, SessionFlag)
	}
	return CheckMPSClient(ctx, input, *control, *session)
}

func runMemoryLimit(ctx context.Context, args []string, input io.Reader) error {
	var limit MemoryLimit
	flags := newFlags(MemoryLimitCommand)
	sockets := flags.String(SocketsFlag, "", "folder with the sockets of the driver's processes")
	flags.StringVar(&limit.PCIAddress, GPUFlag, "", "PCI address of the GPU")
	flags.StringVar(&limit.UUID, UUIDFlag, "", "UUID of the GPU")
	flags.Uint64Var(&limit.Soft, SoftFlag, 0, "bytes that are kept for the container")
	flags.Uint64Var(&limit.Hard, HardFlag, 0, "bytes that it can have")
	if err := parse(flags, args); err != nil {
		return err
	}
	if *sockets == "" || limit.PCIAddress == "" || limit.UUID == "" || limit.Soft == 0 || limit.Hard < limit.Soft {
		return fmt.Errorf("%s: want --%s, --%s, --%s, and --%s not above --%s", MemoryLimitCommand, SocketsFlag, GPUFlag, UUIDFlag, SoftFlag, HardFlag)
	}
	return LimitMemory(ctx, input, *sockets, limit)
}

// newFlags returns flags that come from arguments only.
func newFlags(command string) *flag.FlagSet {
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	return flags
}

// parse refuses arguments that are not flags.
func parse(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%s: %w", flags.Name(), err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%s: unknown argument %s", flags.Name(), quote.Text(flags.Arg(0)))
	}
	return nil
}
