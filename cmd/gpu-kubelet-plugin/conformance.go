// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/conformance"
	"github.com/partage-dev/partage/pkg/node/command"
)

// conformanceRun is what the flags of the sub-command say.
type conformanceRun struct {
	*config

	output                             string
	transcript, replay, cataloguePatch string
	limit, timeout                     time.Duration
	skip                               []string
	changes                            conformanceChanges
}

func conformanceCommand(c *config, stdout io.Writer) *cli.Command {
	r := &conformanceRun{config: c}
	return &cli.Command{
		Name: "conformance",
		Usage: "say for each assumption that the driver makes about this node whether it holds; changes nothing, unless --mps or --intrusive is set. " +
			"Exit code 0: all that could be tested holds, 1: something differs, 2: it, or a part of it, could not be run",
		Flags: r.flags(),
		// A usage error is no difference.
		OnUsageError: func(_ context.Context, _ *cli.Command, err error, _ bool) error { return couldNotRun(err) },
		Action: command.NoArguments(func(ctx context.Context, cmd *cli.Command) error {
			return r.run(ctx, stdout, cmd.Root().ErrWriter)
		}),
	}
}

func (r *conformanceRun) flags() []cli.Flag {
	file := func(name, usage string, destination *string) cli.Flag {
		return &cli.StringFlag{Name: name, Usage: usage, Destination: destination}
	}
	return append([]cli.Flag{
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "table", Destination: &r.output, Usage: "table or json"},
		file("transcript", "file for every question to the node and every call into NVML, with answer and duration; "+toStdout, &r.transcript),
		file("replay", "transcript to make the report from, instead of asking this node", &r.replay),
		file("catalogue-patch", "file for what was measured of the GPUs, in the form of the simulator's catalogue; "+toStdout, &r.cataloguePatch),
		&cli.DurationFlag{Name: "limit", Value: 10 * time.Second, Destination: &r.limit, Usage: "how long the node may take to answer one question"},
		&cli.DurationFlag{Name: "timeout", Value: time.Minute, Destination: &r.timeout, Usage: "how long all questions may take; what was not asked by then is not testable"},
		&cli.StringSliceFlag{Name: "skip", Destination: &r.skip, Usage: "`CHECK`,… that are not to run, by their names in the report, such as mps.ends"},
	}, r.changes.flags()...)
}

// standardOutput in place of a file's name is for kubectl exec: the containers have no
// folder of which files are easily copied.
const (
	standardOutput = "-"
	toStdout       = standardOutput + ": the standard output, and the report goes to the standard error"
)

func couldNotRun(err error) error {
	if err == nil {
		return nil
	}
	return cli.Exit(err, conformance.ExitCouldNotRun)
}

// run prints the report. Its error has the exit code.
func (r *conformanceRun) run(ctx context.Context, stdout, stderr io.Writer) error {
	report, runErr := r.examine(ctx, stdout)
	if report == nil {
		return couldNotRun(runErr)
	}
	out := stdout
	if r.transcript == standardOutput || r.cataloguePatch == standardOutput {
		out = stderr
	}
	write := report.WriteTable
	if r.output == "json" {
		write = report.WriteJSON
	}
	// What was found out counts, also where something could not be written or undone.
	if err := errors.Join(runErr, write(out)); err != nil {
		return couldNotRun(err)
	}
	switch code := report.ExitCode(); code {
	case conformance.ExitHolds:
		return nil
	case conformance.ExitDiffers:
		return cli.Exit(fmt.Sprintf("%d assumptions do not hold on this node", report.Summary.Differs), code)
	default:
		return cli.Exit("this node could not be examined", code)
	}
}

func (r *conformanceRun) validate() error {
	skipErr := conformance.ValidateSkip(r.skip)
	return errors.Join(
		refuse(r.output != "table" && r.output != "json", "--output is %q: want table or json", r.output),
		refuse(r.replay != "" && r.transcript != "", "--transcript and --replay exclude each other"),
		refuse(r.transcript == standardOutput && r.cataloguePatch == standardOutput,
			"--transcript and --catalogue-patch are both the standard output: want a file for one of them"),
		refuse(skipErr != nil, "--skip: %w", skipErr),
		refuse(r.replay != "" && len(r.skip) > 0, "--skip and --replay exclude each other: a transcript says what was skipped"),
		r.changes.validate(), r.validateRoots(), r.process.ValidateLogging(),
	)
}

// refuse returns an error where something is wrong.
func refuse(wrong bool, format string, args ...any) error {
	if !wrong {
		return nil
	}
	return fmt.Errorf(format, args...)
}

// examine makes the report, and writes the files that were asked for.
func (r *conformanceRun) examine(ctx context.Context, stdout io.Writer) (_ *conformance.Report, err error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	if r.replay != "" {
		return r.replayed(ctx, stdout)
	}
	options := conformance.Options{
		Roots: r.roots(), CDIDir: r.cdiRoot, MPSDir: r.mpsDir, SELinuxContext: r.seLinux, CallLimit: r.callLimit, NodeName: r.nodeName,
		Limit: r.limit, Parts: []conformance.Part{conformance.ReadOnly}, NodeInfo: r.nodeInfo, DataDir: r.dataDir(),
		PodUID: r.podUID, Hook: r.installHook, Skip: r.skip,
	}
	release, err := r.changes.alone(r.dataDir())
	if err != nil {
		return nil, err
	}
	defer release()
	// Before the tmpfs for MPS, which may hide where a file cannot be written.
	out, err := r.openFiles(stdout)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	options.Transcript = out.transcript
	if err := r.changes.apply(&options); err != nil {
		return nil, err
	}
	// Who reads the report or the transcript may go away. What was changed must be undone.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP)
	defer stop()
	// The report says what the log would say between its lines.
	r.process.Verbosity = 0
	if err := r.process.SetUpLogging(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout+r.changes.time())
	defer cancel()
	node := conformance.NewNode(options)
	report := conformance.Run(ctx, node)
	return report, errors.Join(writePatch(ctx, node, out.patch), node.Close()) //nolint:contextcheck // ctx may have ended by then
}

// installHook is for a CDI spec that is gone before this process is.
func (r *conformanceRun) installHook() (string, error) {
	hooks, err := r.installHooks()
	if err != nil {
		return "", err
	}
	return hooks.nvidia, nil
}

// outputs are where transcript and patch go. They are opened before anything is done, and again by the process that has the
// tmpfs for MPS.
type outputs struct {
	transcript, patch io.Writer // nil where it is not wanted
	files             []*os.File
}

func (o *outputs) close() error {
	var errs []error
	for _, file := range o.files {
		errs = append(errs, file.Close())
	}
	return errors.Join(errs...)
}

func (r *conformanceRun) openFiles(stdout io.Writer) (*outputs, error) {
	out := &outputs{}
	for _, one := range []struct {
		flag, path string
		writer     *io.Writer
	}{{"transcript", r.transcript, &out.transcript}, {"catalogue-patch", r.cataloguePatch, &out.patch}} {
		switch one.path {
		case "":
			continue
		case standardOutput:
			*one.writer = stdout
			continue
		}
		file, err := os.Create(one.path)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("--%s: %w", one.flag, err), out.close())
		}
		*one.writer, out.files = file, append(out.files, file)
	}
	return out, nil
}

// writePatch writes what was measured, if that was asked for.
func writePatch(ctx context.Context, node *conformance.Node, out io.Writer) error {
	if out == nil {
		return nil
	}
	if err := node.WriteCataloguePatch(ctx, out); err != nil {
		return fmt.Errorf("--catalogue-patch: %w", err)
	}
	return nil
}

// nodeInfo is what the Node object says.
func (r *conformanceRun) nodeInfo(ctx context.Context) (conformance.NodeInfo, error) {
	node, err := r.node(ctx)
	if err != nil {
		return conformance.NodeInfo{}, err
	}
	info := conformance.NodeInfo{Runtime: node.Status.NodeInfo.ContainerRuntimeVersion}
	for _, handler := range node.Status.RuntimeHandlers {
		if f := handler.Features; f != nil && f.UserNamespaces != nil && *f.UserNamespaces {
			info.UserNamespaces = append(info.UserNamespaces, handler.Name)
		}
	}
	return info, nil
}

func (r *conformanceRun) replayed(ctx context.Context, stdout io.Writer) (*conformance.Report, error) {
	file, err := os.Open(r.replay)
	if err != nil {
		return nil, fmt.Errorf("--replay: %w", err)
	}
	defer func() { _ = file.Close() }()
	node, err := conformance.Replay(file)
	if err != nil {
		return nil, fmt.Errorf("--replay %s: %w", r.replay, err)
	}
	report := conformance.Run(ctx, node)
	out, err := r.openFiles(stdout)
	if err != nil {
		return report, err
	}
	return report, errors.Join(writePatch(ctx, node, out.patch), out.close())
}
