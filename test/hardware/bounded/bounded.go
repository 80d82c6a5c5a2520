// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package bounded runs programs, and waits for none without a bound: one that waits within the
// GPU's driver does not end when it is killed.
package bounded

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"sync"
	"time"
)

// killLimit is how long the end of a program that was killed may take.
const killLimit = 3 * time.Second

// Run runs a command that was made with ctx. If it does not end when it is killed with ctx, and
// has had its WaitDelay, it is left behind: its Output goes on then.
func Run(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(cmd.WaitDelay + killLimit):
		return fmt.Errorf("process %d WAS LEFT BEHIND: it was killed and does not end, perhaps it waits for the GPU: %w", cmd.Process.Pid, context.Cause(ctx))
	}
}

// Output is what a program prints. It can be read while that goes on.
type Output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write adds to it.
func (o *Output) Write(text []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(text)
}

// String returns all that was printed so far.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}
