// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// user is a program that uses CUDA in a container.
type user struct {
	cmd    *exec.Cmd
	out    *logBuffer
	exited chan struct{}
}

// clientPath is where containers have the program.
const clientPath = "/usr/bin/cuda-client"

// newUser runs hooks and program of a container with what the spec says.
func (n *node) newUser(ctx context.Context, t testing.TB, spec *oci.Spec, args ...string) (*user, error) {
	t.Helper()
	skipWithoutMounts(t)
	spec.Mounts = append(spec.Mounts, oci.Mount{Source: built.client, Destination: clientPath, Options: []string{"ro"}})
	if spec.Process == nil {
		spec.Process = &oci.Process{}
	}
	spec.Process.Args = append([]string{clientPath}, args...)
	bundle := n.bundle(t, spec)
	if err := runHooks(ctx, spec, bundle); err != nil {
		return nil, err
	}
	u := &user{cmd: containerCommand(bundle), out: &logBuffer{}, exited: make(chan struct{})}
	u.cmd.Stdout, u.cmd.Stderr = u.out, u.out
	if err := u.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = u.cmd.Wait()
		close(u.exited)
	}()
	t.Cleanup(u.end)
	return u, nil
}

// end kills the program.
func (u *user) end() {
	_ = u.cmd.Process.Kill()
	<-u.exited
}

// leave lets the program end by itself.
func (u *user) leave() {
	_ = u.cmd.Process.Signal(syscall.SIGTERM)
	<-u.exited
}

// works fails when the program has ended, or lost what it works with.
func (u *user) works() error {
	select {
	case <-u.exited:
		return fmt.Errorf("the program has ended: %s", u.out)
	default:
	}
	if lines := strings.Split(strings.TrimSpace(u.out.String()), "\n"); lines[len(lines)-1] != "ready" {
		return fmt.Errorf("the program says: %s", u.out)
	}
	return nil
}

// use has a program use the first device of a container until the test ends.
func (n *node) use(t testing.TB, ids ...string) *user {
	t.Helper()
	u, err := n.tryUse(t.Context(), t, n.container(t, ids...))
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// tryUse is use for what may fail.
func (n *node) tryUse(ctx context.Context, t testing.TB, spec *oci.Spec, args ...string) (*user, error) {
	t.Helper()
	u, err := n.newUser(ctx, t, spec, append([]string{"hold", "--memory=1Gi"}, args...)...)
	if err != nil {
		return nil, err
	}
	err = n.eventually(ctx, func() error {
		select {
		case <-u.exited:
			return nil
		default:
		}
		if !strings.Contains(u.out.String(), "ready\n") {
			return errors.New("the program does not get ready")
		}
		return nil
	})
	if err == nil {
		err = u.works()
	}
	return u, err
}

// ask runs the program to its end and returns what it says; it is an error where
// that is one.
func (n *node) ask(t testing.TB, spec *oci.Spec, args ...string) (string, error) {
	t.Helper()
	u, err := n.newUser(t.Context(), t, spec, args...)
	if err != nil {
		return "", err
	}
	<-u.exited
	if code := u.cmd.ProcessState.ExitCode(); code != 0 {
		return u.out.String(), fmt.Errorf("exit code %d: %s", code, u.out)
	}
	return u.out.String(), nil
}

// containerStarts succeeds when a program in a container runs as an MPS client.
func (n *node) containerStarts(t testing.TB, ids []string) func(context.Context) error {
	return func(context.Context) error {
		out, err := n.ask(t, n.container(t, ids...), "info", "--timeout=5s")
		if err == nil && !strings.Contains(out, "as a client") {
			err = fmt.Errorf("the program says %s", out)
		}
		return err
	}
}
