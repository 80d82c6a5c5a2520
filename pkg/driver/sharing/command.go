// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
)

// exitError is the exit of a program with another code than 0.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// run runs a program of the driver in the queue of a GPU, and kills it when it takes too long or
// ctx is done. It returns the output with an exitError too.
//
// A program that cannot be killed is stuck in the kernel driver. Since it may still have an effect, the error is a
// *gpu.PendingError then.
func (m *Manager) run(ctx context.Context, d Device, program host.Program, args []string) (string, error) {
	return call.Do(ctx, m.options.Calls.GPU(d.PCIAddress), computePolicy, func() (string, error) {
		limited, cancel := context.WithTimeout(ctx, m.options.CommandLimit)
		defer cancel()
		out, err := m.execute(limited, program, args)
		return out, explain(ctx, limited, d, err)
	})
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
