// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/command"
	"github.com/partage-dev/partage/pkg/conformance"
)

// conformanceRun is what the flags of the sub-command say.
type conformanceRun struct {
	*config

	output                             string
	transcript, replay, cataloguePatch string
	limit, timeout                     time.Duration
	changes                            conformanceChanges
}

func conformanceCommand(c *config, stdout io.Writer) *cli.Command {
	r := &conformanceRun{config: c}
	return &cli.Command{
		Name: "conformance",
		Usage: "say for each assumption that the driver makes about this node whether it holds; changes nothing. " +
			"Exit code 0: all that could be tested holds, 1: something differs, 2: it could not be run",
		Flags: r.flags(),
		// A usage error is no difference.
		OnUsageError: func(_ context.Context, _ *cli.Command, err error, _ bool) error { return couldNotRun(err) },
		Action: command.NoArguments(func(ctx context.Context, _ *cli.Command) error {
			return r.run(ctx, stdout)
		}),
	}
}

func (r *conformanceRun) flags() []cli.Flag {
	file := func(name, usage string, destination *string) cli.Flag {
		return &cli.StringFlag{Name: name, Usage: usage, Destination: destination}
	}
	return append([]cli.Flag{
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "table", Destination: &r.output, Usage: "table or json"},
		file("transcript", "file for every question to the node and every call into NVML, with answer and duration", &r.transcript),
		file("replay", "transcript to make the report from, instead of asking this node", &r.replay),
		file("catalogue-patch", "file for what was measured of the GPUs, in the form of the simulator's catalogue", &r.cataloguePatch),
		&cli.DurationFlag{Name: "limit", Value: 10 * time.Second, Destination: &r.limit, Usage: "how long the node may take to answer one question"},
		&cli.DurationFlag{Name: "timeout", Value: time.Minute, Destination: &r.timeout, Usage: "how long all questions may take; what was not asked by then is not testable"},
	}, r.changes.flags()...)
}

// codedError is an error with an exit code of its own.
type codedError struct {
	error

	code int
}

func (e codedError) ExitCode() int { return e.code }
func (e codedError) Unwrap() error { return e.error }

func couldNotRun(err error) error {
	if err == nil {
		return nil
	}
	return codedError{err, conformance.ExitCouldNotRun}
}

// run prints the report. Its error has the exit code.
func (r *conformanceRun) run(ctx context.Context, out io.Writer) error {
	report, err := r.examine(ctx)
	if err != nil {
		return couldNotRun(err)
	}
	write := report.WriteTable
	if r.output == "json" {
		write = report.WriteJSON
	}
	if err := write(out); err != nil {
		return couldNotRun(err)
	}
	switch code := report.ExitCode(); code {
	case conformance.ExitHolds:
		return nil
	case conformance.ExitDiffers:
		return codedError{fmt.Errorf("%d assumptions do not hold on this node", report.Summary.Differs), code}
	default:
		return codedError{errors.New("this node could not be examined"), code}
	}
}

func (r *conformanceRun) validate() error {
	var errs []error
	if r.output != "table" && r.output != "json" {
		errs = append(errs, fmt.Errorf("--output is %q: want table or json", r.output))
	}
	if r.replay != "" && r.transcript != "" {
		errs = append(errs, errors.New("--transcript and --replay exclude each other"))
	}
	return errors.Join(append(errs, r.changes.validate(), r.validateRoots(), r.process.ValidateLogging())...)
}

// examine makes the report, and writes the files that were asked for.
func (r *conformanceRun) examine(ctx context.Context) (_ *conformance.Report, err error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	if r.replay != "" {
		return r.replayed(ctx)
	}
	options := conformance.Options{
		Roots: r.roots(), CDIDir: r.cdiRoot, MPSDir: r.mpsDir, CallLimit: r.callLimit, NodeName: r.nodeName,
		Limit: r.limit, Parts: []conformance.Part{conformance.ReadOnly},
	}
	if err := r.changes.apply(&options, r.dataDir()); err != nil {
		return nil, err
	}
	if r.transcript != "" {
		file, err := os.Create(r.transcript)
		if err != nil {
			return nil, fmt.Errorf("--transcript: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		options.Transcript = file
	}
	if err := r.process.SetUpLogging(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	node := conformance.NewNode(options)
	report := conformance.Run(ctx, node)
	return report, node.Close()
}

func (r *conformanceRun) replayed(ctx context.Context) (*conformance.Report, error) {
	file, err := os.Open(r.replay)
	if err != nil {
		return nil, fmt.Errorf("--replay: %w", err)
	}
	defer func() { _ = file.Close() }()
	node, err := conformance.Replay(file)
	if err != nil {
		return nil, fmt.Errorf("--replay %s: %w", r.replay, err)
	}
	return conformance.Run(ctx, node), nil
}
