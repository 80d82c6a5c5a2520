// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/must"
)

// Program is a program that uses CUDA in a container.
type Program struct {
	cmd    *exec.Cmd
	out    *LogBuffer
	exited chan struct{}
}

// clientPath is where containers have the program.
const clientPath = "/usr/bin/cuda-client"

// NewProgram runs the hooks of a container and starts a program in it.
func (n *Node) NewProgram(ctx context.Context, t testing.TB, spec *oci.Spec, args ...string) (*Program, error) {
	t.Helper()
	SkipWithoutMounts(t)
	spec.Mounts = append(spec.Mounts, oci.Mount{Source: Built.Client, Destination: clientPath, Options: []string{"ro"}})
	if spec.Process == nil {
		spec.Process = &oci.Process{}
	}
	spec.Process.Args = append([]string{clientPath}, args...)
	bundle := n.bundle(t, spec)
	if err := runHooks(ctx, spec, bundle); err != nil {
		return nil, err
	}
	u := &Program{cmd: containerCommand(bundle), out: &LogBuffer{}, exited: make(chan struct{})}
	u.cmd.Stdout, u.cmd.Stderr = u.out, u.out
	if err := startIn(u.cmd, spec.Linux.CgroupsPath); err != nil {
		return nil, err
	}
	go func() {
		_ = u.cmd.Wait()
		close(u.exited)
	}()
	t.Cleanup(u.Kill)
	return u, nil
}

// PID is that of the program on the host.
func (u *Program) PID() int { return u.cmd.Process.Pid }

// Kill kills the program.
func (u *Program) Kill() {
	_ = u.cmd.Process.Kill()
	<-u.exited
}

// Stop lets the program end by itself.
func (u *Program) Stop() {
	_ = u.cmd.Process.Signal(syscall.SIGTERM)
	<-u.exited
}

// Check fails when the program has ended or has lost its server.
func (u *Program) Check() error {
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

// StartProgram starts a program that uses the first device of a container until the
// test ends.
func (n *Node) StartProgram(t testing.TB, ids ...string) *Program {
	t.Helper()
	return must.Get(n.TryStartProgram(t.Context(), t, n.Container(t, ids...)))(t)
}

// TryStartProgram is StartProgram where that may fail.
func (n *Node) TryStartProgram(ctx context.Context, t testing.TB, spec *oci.Spec, args ...string) (*Program, error) {
	t.Helper()
	return n.StartReady(ctx, t, spec, append([]string{"hold", "--memory=1Gi"}, args...)...)
}

// StartReady starts a program that says when it is ready, and waits for that.
func (n *Node) StartReady(ctx context.Context, t testing.TB, spec *oci.Spec, args ...string) (*Program, error) {
	t.Helper()
	u, err := n.NewProgram(ctx, t, spec, args...)
	if err != nil {
		return nil, err
	}
	err = Eventually(ctx, func() error {
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
		err = u.Check()
	}
	return u, err
}

// RunProgram runs a program to its end and returns its output, and an error if it
// fails.
func (n *Node) RunProgram(t testing.TB, spec *oci.Spec, args ...string) (string, error) {
	t.Helper()
	u, err := n.NewProgram(t.Context(), t, spec, args...)
	if err != nil {
		return "", err
	}
	<-u.exited
	if code := u.cmd.ProcessState.ExitCode(); code != 0 {
		return u.out.String(), fmt.Errorf("exit code %d: %s", code, u.out)
	}
	return u.out.String(), nil
}

// CheckContainerStarts returns a check that a container starts and its program is an
// MPS client.
func (n *Node) CheckContainerStarts(t testing.TB, ids []string) func(context.Context) error {
	return func(context.Context) error {
		out, err := n.RunProgram(t, n.Container(t, ids...), "info", "--timeout=5s")
		if err == nil && !strings.Contains(out, "as a client") {
			err = fmt.Errorf("the program says %s", out)
		}
		return err
	}
}
