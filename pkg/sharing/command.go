// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// killGrace is how long a program that was killed may take to end. One that does not
// is stuck in the kernel driver.
const killGrace = 3 * time.Second

// exitError is the exit of a program with another code than 0.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// run runs a program of the driver on a GPU, and kills it when it takes too long or
// ctx is done. It returns the output with an exitError too.
//
// A program that cannot be killed is left behind. Since it may still have an effect,
// the error is a gpu.HungError, whose Done is closed when the program ends.
func (m *Manager) run(ctx context.Context, d Device, program host.Program, args []string) (string, error) {
	limited, cancel := context.WithTimeout(ctx, m.commandLimit)
	defer cancel()
	type result struct {
		out string
		err error
	}
	results, done := make(chan result, 1), make(chan struct{})
	since := time.Now()
	go func() {
		defer close(done)
		out, err := m.execute(limited, program, args)
		results <- result{out, err}
	}()
	select {
	case r := <-results:
		return r.out, explain(ctx, limited, d, r.err)
	case <-limited.Done():
	}
	grace := time.NewTimer(killGrace)
	defer grace.Stop()
	select {
	case r := <-results:
		return r.out, explain(ctx, limited, d, r.err)
	case <-grace.C:
	}
	logger := klog.FromContext(ctx)
	go func() {
		<-done
		logger.Info("A program that could not be killed has ended", "program", program.Path, "args", args,
			"pciAddress", d.PCIAddress, "took", time.Since(since).Round(time.Millisecond))
	}()
	return "", &gpu.HungError{Call: computePolicy, PCIAddress: d.PCIAddress, Since: since, Done: done}
}

// explain returns why a program failed: by itself, or because it was killed.
func explain(ctx, limited context.Context, d Device, err error) error {
	var failed *exitError
	switch {
	case err == nil || errors.As(err, &failed):
		return err
	case ctx.Err() != nil:
		return &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress, Text: "killed: " + ctx.Err().Error(), Err: ctx.Err(),
		}
	case limited.Err() != nil:
		return &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress, Text: "took too long and was killed", Err: gpu.ErrTimeout,
		}
	}
	return err
}

// execute runs a program and returns when it has ended.
func execute(ctx context.Context, program host.Program, args []string) (string, error) {
	cmd := program.Command(ctx, args...)
	cmd.WaitDelay = 5 * time.Second // for what it may have started
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() >= 0 {
		return string(out), &exitError{exit.ExitCode()}
	}
	if err != nil {
		return string(out), fmt.Errorf("run %s: %w", program.Path, err)
	}
	return string(out), nil
}
