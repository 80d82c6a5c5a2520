// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Program is where the cuda-probe is, and what a run of it finds around itself.
type Program struct {
	Path string
	// Device is the UUID of the only device that it sees, also where it does not reach the MPS
	// daemon that it was to be a client of. Without one it sees none.
	Device string
	// Env is the rest of its environment.
	Env []string
	// Namespaces are flags of clone(2), such as syscall.CLONE_NEWPID.
	Namespaces uintptr
}

// A user namespace has these users of this process's one, as the kubelet gives them to pods.
const firstUser, users = 100000, 65536

// endLimit is how long the output of a program may take after its end.
const endLimit = 5 * time.Second

// Run runs the program to its end and returns what it said, also if CUDA did not do
// what it was to do: the last event is then Failed.
func (p Program) Run(ctx context.Context, o Options) ([]Event, error) {
	run, err := p.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	return run.Finish(ctx)
}

// Start starts the program. ctx ends it, by SIGKILL.
func (p Program) Start(ctx context.Context, o Options) (*Process, error) {
	cmd := exec.CommandContext(ctx, p.Path, o.Arguments()...)
	cmd.Env = append(slices.Clone(p.Env), "CUDA_VISIBLE_DEVICES="+p.Device) // of two values the last one counts
	cmd.Dir = "/"
	cmd.WaitDelay = endLimit
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: p.Namespaces}
	if p.Namespaces&syscall.CLONE_NEWUSER != 0 {
		all := []syscall.SysProcIDMap{{ContainerID: 0, HostID: firstUser, Size: users}}
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = all, all
		cmd.SysProcAttr.GidMappingsEnableSetgroups = true
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 0, Gid: 0} // in the namespace
	}
	stdout, output := io.Pipe()
	run := &Process{cmd: cmd, stdout: stdout, events: json.NewDecoder(stdout)}
	cmd.Stdout, cmd.Stderr = output, &run.stderr
	var err error
	if run.stdin, err = cmd.StdinPipe(); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", p.Path, err)
	}
	go func() {
		run.err = cmd.Wait()
		_ = output.Close() // it does not fail
	}()
	return run, nil
}

// Process is a run of cuda-probe.
type Process struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stdout *io.PipeReader // ends when the process has ended; err is valid then
	stderr strings.Builder
	events *json.Decoder
	seen   []Event
	err    error
}

// PID is the process's ID in this process's namespace.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Until waits for an event of the kind, and returns all that there were so far. If the
// program fails instead, that is the last event.
func (p *Process) Until(ctx context.Context, kind Kind) ([]Event, error) {
	return p.until(ctx, kind, Failed)
}

// until waits for an event of the kinds, or for the program's end. ctx ends the wait and what the program says.
func (p *Process) until(ctx context.Context, kinds ...Kind) ([]Event, error) {
	defer context.AfterFunc(ctx, func() { _ = p.stdout.Close() })()
	for {
		var e Event
		if p.events.Decode(&e) != nil {
			break
		}
		p.seen = append(p.seen, e)
		if slices.Contains(kinds, e.Kind) {
			return p.seen, nil
		}
	}
	_, _ = io.Copy(io.Discard, p.stdout) // what is no event
	if ctx.Err() != nil {
		return p.seen, context.Cause(ctx)
	}
	return p.seen, p.failure()
}

// failure is nil if the program said itself why it ended.
func (p *Process) failure() error {
	text := strings.TrimSpace(p.stderr.String())
	switch n := len(p.seen); {
	case n > 0 && (p.seen[n-1].Kind == Done || p.seen[n-1].Kind == Failed):
		return nil
	case p.err == nil:
		return errors.New("the CUDA program ended without saying how")
	case text == "":
		return fmt.Errorf("the CUDA program: %w", p.err)
	}
	return fmt.Errorf("the CUDA program: %w: %s", p.err, text)
}

// Finish asks the program to end, waits for that, and returns all that it said.
func (p *Process) Finish(ctx context.Context) ([]Event, error) {
	_ = p.stdin.Close()
	return p.until(ctx)
}

// Kill ends the program by SIGKILL, and returns all that it said.
func (p *Process) Kill(ctx context.Context) ([]Event, error) {
	_ = p.cmd.Process.Kill()
	seen, err := p.until(ctx)
	if ctx.Err() == nil {
		err = nil // its end was wanted
	}
	return seen, err
}

// Find returns the last event of a kind.
func Find(events []Event, kind Kind) (Event, bool) {
	for i := len(events) - 1; i >= 0; i-- {
		if events[i].Kind == kind {
			return events[i], true
		}
	}
	return Event{}, false
}
