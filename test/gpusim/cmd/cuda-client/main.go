// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command cuda-client stands in for a CUDA program on a simulated machine. It sees
// the devices that a CUDA program would see where it runs, is a client of MPS
// where a control daemon can be reached, and shows what it gets.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/mps"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := app(os.Stdout).Run(ctx, os.Args)
	stop()
	if err != nil {
		if !errors.Is(err, errShown) {
			fmt.Println(err) // where the rest of the output goes, too
		}
		os.Exit(1)
	}
}

// errShown is for failures that the output has shown already.
var errShown = errors.New("failed")

func app(out io.Writer) *cli.Command {
	return &cli.Command{
		Name:           "cuda-client",
		Usage:          "a CUDA program for simulated GPUs",
		Writer:         out,
		ErrWriter:      out,
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
		OnUsageError:   func(_ context.Context, _ *cli.Command, err error, _ bool) error { return err },
		Commands:       []*cli.Command{infoCommand(), allocCommand(), holdCommand(), faultCommand(), watchCommand(), passCommand(), takeCommand()},
		Action: func(_ context.Context, c *cli.Command) error {
			if c.Args().Present() {
				return fmt.Errorf("there is no command %q, see cuda-client --help", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
	}
}

func flags(more ...cli.Flag) []cli.Flag {
	return append([]cli.Flag{
		&cli.IntFlag{Name: "device", Usage: "`N`umber of the device, as CUDA counts"},
		&cli.StringFlag{Name: "shm", Usage: "`DIR` that is this program's /dev/shm, for a program that is not in a container", Value: mps.SharedMemory},
		&cli.DurationFlag{Name: "timeout", Usage: "give up when there is no MPS server after this `TIME` (default: never, like CUDA)"},
	}, more...)
}

// with runs use for a program that has initialised CUDA.
func with(ctx context.Context, c *cli.Command, use func(context.Context, *program) error) error {
	p, err := start(ctx, c)
	if err != nil {
		return err
	}
	defer p.Close()
	return use(ctx, p)
}

func start(ctx context.Context, c *cli.Command) (*program, error) {
	if timeout := c.Duration("timeout"); timeout > 0 {
		limited, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		p, err := initialize(limited, c.String("shm"))
		if limited.Err() != nil {
			return nil, fmt.Errorf("no answer from the MPS control daemon in %v", timeout)
		}
		return p, err
	}
	return initialize(ctx, c.String("shm"))
}

// device is the one that the user chose, with a context on it.
func device(c *cli.Command, p *program) (int, error) {
	n := c.Int("device")
	if n < 0 || n >= len(p.devices) {
		return 0, cuda.InvalidDevice
	}
	return n, p.Context(n)
}

func infoCommand() *cli.Command {
	return &cli.Command{
		Name:  "info",
		Usage: "print the devices, how the program runs on them, and its limits",
		Flags: flags(&cli.BoolFlag{Name: "free", Usage: "print what cudaMemGetInfo returns, too"}),
		Action: func(ctx context.Context, c *cli.Command) error {
			return with(ctx, c, func(_ context.Context, p *program) error {
				failed := false
				for n := range p.devices {
					if err := p.Context(n); err != nil {
						fmt.Fprintf(c.Root().Writer, "device %d: %v\n", n, err)
						failed = true
						continue
					}
					err := p.describe(c, n)
					if err != nil {
						return fmt.Errorf("device %d: %w", n, err)
					}
				}
				if failed {
					return errShown
				}
				return nil
			})
		},
	}
}

// describe prints what a program can find out about a device.
func (p *program) describe(c *cli.Command, n int) error {
	out := c.Root().Writer
	d, l := p.devices[n], p.limits[n]
	fmt.Fprintf(out, "device %d: %s\n  UUID: %s\n", n, d.Name, d.UUID)
	limit := "no limit"
	if l.Memory > 0 {
		limit = "limit " + mebibytes(l.Memory)
	}
	fmt.Fprintf(out, "  memory: %s, %s\n", mebibytes(d.Memory), limit)
	if c.Bool("free") {
		free, total, err := p.MemoryInfo(n)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  memory info: %s free of %s\n", mebibytes(free), mebibytes(total))
	}
	fmt.Fprintf(out, "  multiprocessors: %d of %d (%s %%)\n", d.Limited(l.Percentage), d.Multiprocessors, strconv.FormatFloat(l.Percentage, 'f', -1, 64))
	fmt.Fprintf(out, "  runs: %s\n", p.how(n))
	return nil
}

func mebibytes(bytes uint64) string { return fmt.Sprintf("%d MiB", bytes>>20) }

func allocCommand() *cli.Command {
	return &cli.Command{
		Name:        "alloc",
		Usage:       "allocate amounts of memory, one after the other",
		ArgsUsage:   "SIZE…",
		Description: "A SIZE is a number of bytes, or one with Ki, Mi or Gi. Fails if any allocation does.",
		Flags:       flags(),
		Action: func(ctx context.Context, c *cli.Command) error {
			sizes, err := sizesOf(c.Args().Slice())
			if err != nil {
				return err
			}
			return with(ctx, c, func(_ context.Context, p *program) error {
				n, err := device(c, p)
				if err != nil {
					return err
				}
				var failed error
				for _, size := range sizes {
					if err := p.take(c.Root().Writer, n, size); err != nil {
						failed = err
					}
				}
				return failed
			})
		},
	}
}

// take allocates memory and says so.
func (p *program) take(out io.Writer, n int, size uint64) error {
	if err := p.Alloc(n, size); err != nil {
		fmt.Fprintf(out, "device %d: %v (%s wanted)\n", n, err, mebibytes(size))
		return errShown
	}
	fmt.Fprintf(out, "device %d: allocated %s\n", n, mebibytes(size))
	return nil
}

func sizesOf(texts []string) ([]uint64, error) {
	if len(texts) == 0 {
		return nil, errors.New("say how much memory, for example 8Gi")
	}
	var sizes []uint64
	for _, text := range texts {
		size, err := parseSize(text)
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, size)
	}
	return sizes, nil
}

func parseSize(text string) (uint64, error) {
	digits, shift := text, 0
	for unit, s := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30} {
		if rest, ok := strings.CutSuffix(text, unit); ok {
			digits, shift = rest, s
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64-shift)
	if err != nil {
		return 0, fmt.Errorf("%q is not an amount of memory such as 8Gi or 512Mi", text)
	}
	return n << shift, nil
}

func holdCommand() *cli.Command {
	return &cli.Command{
		Name:  "hold",
		Usage: "use a device until SIGTERM",
		Description: "Prints \"ready\" when it does. Ends with an error when its work is ended, as by the fault\n" +
			"of another client.",
		Flags: flags(
			&cli.StringFlag{Name: "memory", Usage: "allocate this `SIZE` first"},
			&cli.DurationFlag{Name: "fault-after", Usage: "do an illegal access after this `TIME`"},
			&cli.IntFlag{Name: "contexts", Usage: "have `N` contexts", Value: 1},
			&cli.BoolFlag{Name: "busy", Usage: "have a kernel on the device all the time, so that being killed is not harmless"},
			&cli.IntFlag{Name: "sm", Usage: "the `PERCENTAGE` of the multiprocessors that --busy keeps busy, without MPS", Value: 100},
			&cli.BoolFlag{Name: "ignore-sigterm", Usage: "go on after SIGTERM, like the first process of a container that has no handler"},
			&cli.BoolFlag{Name: "stay", Usage: "stay when the work is ended, like a program that does not look at errors"},
		),
		Action: func(ctx context.Context, c *cli.Command) error {
			return with(ctx, c, func(ctx context.Context, p *program) error { return hold(ctx, c, p) })
		},
	}
}

func hold(ctx context.Context, c *cli.Command, p *program) error {
	n, err := device(c, p)
	if err != nil {
		return err
	}
	out := c.Root().Writer
	if text := c.String("memory"); text != "" {
		size, err := parseSize(text)
		if err != nil {
			return err
		}
		if err := p.take(out, n, size); err != nil {
			return err
		}
	}
	if err := p.work(c, n); err != nil {
		return fmt.Errorf("device %d: %w", n, err)
	}
	if c.Bool("ignore-sigterm") {
		signal.Ignore(syscall.SIGTERM)
		ctx = context.WithoutCancel(ctx)
	}
	fmt.Fprintln(out, "ready")
	var fault <-chan time.Time
	if after := c.Duration("fault-after"); after > 0 {
		fault = time.After(after)
	}
	select {
	case <-ctx.Done():
		return p.Synchronize(n)
	case <-p.Ended():
		err = p.Failure()
	case <-fault:
		err = p.Fault(n)
	}
	fmt.Fprintf(out, "device %d: %v\n", n, err)
	if c.Bool("stay") {
		<-ctx.Done()
	}
	return errShown
}

// work makes the contexts and starts the kernel that the user wants.
func (p *program) work(c *cli.Command, n int) error {
	for range c.Int("contexts") - 1 { // one is there
		if err := p.NewContext(n); err != nil {
			return err
		}
	}
	if c.Bool("busy") {
		return p.Launch(n, c.Int("sm"))
	}
	return nil
}

func faultCommand() *cli.Command {
	return &cli.Command{
		Name:  "fault",
		Usage: "do an illegal access, which is fatal for all programs that share the MPS server",
		Flags: flags(),
		Action: func(ctx context.Context, c *cli.Command) error {
			return with(ctx, c, func(_ context.Context, p *program) error {
				n, err := device(c, p)
				if err != nil {
					return err
				}
				return fmt.Errorf("device %d: %w", n, p.Fault(n))
			})
		},
	}
}
