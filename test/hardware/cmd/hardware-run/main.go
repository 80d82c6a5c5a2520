// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command hardware-run examines a machine with a real GPU in minutes, without changing a
// setting of it, and makes one archive of what it saw. test/hardware/run starts it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/hardware/bundle"
	"github.com/partage-dev/partage/test/hardware/trial"
)

// Exit codes.
const (
	exitDone     = 0
	exitChanged  = 1 // a setting of a GPU is another one than before
	exitCannot   = 2 // it could not be run, or a part of it could not be finished
	exitRefused  = 3 // somebody works there
	exitUnusable = exitCannot
)

const name = "hardware-run"

// Sub-commands, for this program itself and for test/hardware/build.
const (
	trialsCommand = "trials"
	checkCommand  = "check"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	syscall.Umask(0o022) // programs of other users go through what is made here
	var err error
	code := exitDone
	switch {
	case len(args) > 0 && args[0] == trialsCommand:
		err = runTrials(ctx, args[1:], stdout)
	case len(args) == 3 && args[0] == trial.BindCommand:
		err = trial.Bind(args[1], args[2])
	case len(args) == 2 && args[0] == checkCommand:
		const mostBytes = 60 << 20 // some more than that is carried to a machine at most
		err = bundle.CheckBuilt(ctx, args[1], mostBytes)
	default:
		code, err = examine(ctx, args, stdout)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "%s: %v\n", name, err)
		if code == exitDone {
			code = exitUnusable
		}
	}
	return code
}

// options are the flags.
type options struct {
	roots      host.Roots
	bundle     string
	out        string
	gpu        string
	kubeletDir string
	readOnly   bool
	budget     time.Duration
}

func rootFlags(flags *flag.FlagSet, roots *host.Roots) {
	flags.StringVar(&roots.Driver, "driver-root", "/", "root of the tree with the driver's libraries and programs")
	flags.StringVar(&roots.Dev, "dev-root", "/", "root of the tree that holds dev/nvidia0")
	flags.StringVar(&roots.Proc, "proc-root", "/proc", "directory that holds driver/nvidia")
	flags.StringVar(&roots.Sys, "sys-root", "/sys", "directory that holds bus/pci/devices")
}

// defaultBudget, with the time to undo what was going on when it is over, is less than nine minutes.
const defaultBudget = 8*time.Minute + 20*time.Second

func parse(args []string, stdout io.Writer) (*options, error) {
	o := &options{}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(stdout)
	rootFlags(flags, &o.roots)
	flags.StringVar(&o.bundle, "bundle", "_output/hardware", "folder that test/hardware/build has made")
	flags.StringVar(&o.out, "out", os.Getenv("OUT"), "folder for the archive; by default that of the variable OUT, else the current one")
	flags.StringVar(&o.gpu, "gpu", "", "index or UUID of the GPU for MPS; by default the first that nobody uses")
	flags.StringVar(&o.kubeletDir, "kubelet-plugins-dir", "/var/lib/kubelet/plugins", "the kubelet's directory for plugin data, where a node has one")
	flags.BoolVar(&o.readOnly, "read-only", false, "only look, and start no MPS")
	flags.DurationVar(&o.budget, "budget", defaultBudget, "how long all may take")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("got argument %q: want flags only", flags.Arg(0))
	}
	if o.budget < endTime+graceLimit {
		return nil, fmt.Errorf("--budget is %s: want at least %s", o.budget, endTime+graceLimit)
	}
	if o.out == "" {
		o.out = "."
	}
	var err error
	if o.bundle, err = filepath.Abs(o.bundle); err != nil {
		return nil, err
	}
	o.roots = o.roots.Complete()
	return o, nil
}

// examine is what this program is for.
func examine(ctx context.Context, args []string, stdout io.Writer) (int, error) {
	o, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitDone, nil
	}
	if err != nil {
		return exitUnusable, err
	}
	// Before anything else: what cannot start costs the whole loan.
	if err := bundle.Check(ctx, o.bundle); err != nil {
		return exitUnusable, err
	}
	p, err := newPlan(ctx, o, stdout)
	if err != nil {
		var refused refusedError
		if errors.As(err, &refused) {
			return exitRefused, err
		}
		return exitUnusable, err
	}
	return p.run(ctx)
}

// runTrials is the sub-command trials.
func runTrials(ctx context.Context, args []string, stdout io.Writer) error {
	var o trial.Options
	var isolated string
	flags := flag.NewFlagSet(trialsCommand, flag.ContinueOnError)
	rootFlags(flags, &o.Roots)
	flags.StringVar(&o.GPU, "gpu", "", "UUID of the GPU")
	flags.StringVar(&o.Folder, "folder", "", "folder for the files of MPS")
	flags.StringVar(&o.Probe, "cuda-probe", "", "program cuda-probe")
	flags.StringVar(&isolated, "not-isolated", "", "why this process has no mount namespace of its own")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var why error
	if isolated != "" {
		why = errors.New(isolated)
	}
	return trial.Run(ctx, o, why, stdout)
}
