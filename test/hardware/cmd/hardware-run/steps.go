// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/hardware/bounded"
)

// step is a part of the plan with a time of its own.
type step struct {
	name  string
	limit time.Duration
	take  func(context.Context) (string, error)
}

// outcome is what became of a step.
type outcome struct {
	Step     string `json:"step"`
	Text     string `json:"text"`
	Took     string `json:"took"`
	Finished bool   `json:"finished"`
}

// Their sum is less than the budget.
const (
	factsLimit       = 70 * time.Second
	conformanceLimit = 70 * time.Second
	trialsLimit      = 140 * time.Second
	mpsLimit         = 170 * time.Second
	// graceLimit is how long a program may take to undo what it has done.
	graceLimit = 20 * time.Second
)

func (p *plan) all() []step {
	steps := []step{
		{"facts", factsLimit, p.facts},
		{"conformance", conformanceLimit, func(ctx context.Context) (string, error) { return p.conformance(ctx, "conformance") }},
	}
	if !p.mps {
		return steps
	}
	return append(
		steps,
		step{"trials", trialsLimit, p.trials},
		step{"conformance-mps", mpsLimit, func(ctx context.Context) (string, error) {
			return p.conformance(ctx, "conformance-mps", "--mps", "--gpu="+p.gpu.UUID, "--skip="+killsAtWork, "--work-dir="+p.workDir())
		}},
	)
}

// killsAtWork are the checks that kill programs in the middle of their work, after which
// NVIDIA promises nothing.
const killsAtWork = "mps.ends,mps.server-lost"

// errCannot says that a step is not possible on this machine, which is no failure.
var errCannot = errors.New("could not be tried")

func (p *plan) take(ctx context.Context, s step) {
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	text, err := s.take(limited)
	switch {
	case errors.Is(err, errCannot):
		text = err.Error()
	case err != nil && limited.Err() != nil:
		text = fmt.Sprintf("not finished in time: %v", err)
	case err != nil:
		text = err.Error()
	}
	o := outcome{s.name, text, time.Since(began).Round(100 * time.Millisecond).String(), err == nil || errors.Is(err, errCannot)}
	p.steps = append(p.steps, o)
	p.say("%-16s %8s  %s", o.Step, o.Took, o.Text)
}

// command prepares a program of the bundle. When the time is over it is asked to end, so that
// it can undo what it has done.
func (p *plan) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bundle, program), args...)
	cmd.Dir = "/"
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = graceLimit
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	return cmd
}

func (p *plan) roots() []string {
	return []string{
		"--driver-root=" + p.options.roots.Driver, "--dev-root=" + p.options.roots.Dev,
		"--proc-root=" + p.options.roots.Proc, "--sys-root=" + p.options.roots.Sys,
	}
}

// conformance runs the conformance command. Its report is made from the redacted transcript later.
func (p *plan) conformance(ctx context.Context, name string, flags ...string) (string, error) {
	if err := p.write(name+"/transcript.jsonl", ""); err != nil {
		return "", err
	}
	transcript := filepath.Join(p.results, name, "transcript.jsonl")
	args := append([]string{
		"conformance", "--node-name=gpu-node", "--timeout=1m", "--transcript=" + transcript, "--cuda-probe=" + filepath.Join(p.bundle, "cuda-probe"),
		// Nothing is written into the folders of a kubelet.
		"--kubelet-plugins-dir=" + filepath.Join(p.work, "plugins"),
	}, append(p.roots(), flags...)...)
	cmd := p.command(ctx, "gpu-kubelet-plugin", args...)
	var stdout, stderr bounded.Output
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := bounded.Run(ctx, cmd)
	if writeErr := p.write(name+"/errors.txt", stderr.String()); writeErr != nil {
		return "", writeErr
	}
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	summary := lines[len(lines)-1]
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.Exited() && ctx.Err() == nil {
		const notRun = 2
		if summary == "" && exit.ExitCode() == notRun {
			return "", fmt.Errorf("%w: %s", errCannot, strings.TrimSpace(stderr.String()))
		}
		err = nil // the exit code says what the report says
	}
	if summary == "" && err == nil {
		err = errors.New("there is no report")
	}
	return summary, err
}

// trials runs those with an MPS daemon of their own in a mount namespace, or without one
// where that is not allowed.
func (p *plan) trials(ctx context.Context) (string, error) {
	if err := os.MkdirAll(p.mpsFolder(), 0o755); err != nil {
		return "", fmt.Errorf("make a folder for MPS: %w", err)
	}
	args := append([]string{
		trialsCommand, "--gpu=" + p.gpu.UUID, "--folder=" + p.mpsFolder(), "--cuda-probe=" + filepath.Join(p.bundle, "cuda-probe"),
	}, p.roots()...)
	var stdout, stderr bounded.Output
	start := func(more ...string) error {
		cmd := p.command(ctx, name, append(args, more...)...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if len(more) == 0 {
			cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
		}
		return bounded.Run(ctx, cmd)
	}
	err := start()
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
		err = start(fmt.Sprintf("--not-isolated=a mount namespace cannot be made: %v", err))
	}
	logsErr := p.keepLogs()
	text, tableErr := table(stdout.String())
	writeErr := errors.Join(p.write("trials/trials.jsonl", stdout.String()), p.write("trials/trials.txt", text), p.write("trials/errors.txt", stderr.String()))
	if err != nil {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return fmt.Sprintf("%d trials", strings.Count(stdout.String(), "\n")), errors.Join(err, logsErr, tableErr, writeErr)
}

// keepLogs takes the logs of MPS into the results.
func (p *plan) keepLogs() error {
	logs, err := filepath.Glob(filepath.Join(p.mpsFolder(), "log", "*.log"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range logs {
		text, err := os.ReadFile(path)
		errs = append(errs, err, p.write("trials/"+filepath.Base(path), string(text)))
	}
	return errors.Join(errs...)
}
