// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package control speaks to an MPS control daemon through NVIDIA's
// nvidia-cuda-mps-control.
//
// A memory limit names its device by the index among the session's devices, not by
// UUID: there are drivers that accept a UUID and then do not apply the limit. The
// daemon's CUDA_VISIBLE_DEVICES lists UUIDs, so the index is unambiguous.
//
// NVIDIA's program connects by itself, to any process that listens there. So the caller
// says how the sockets are checked, which is done before and after each run: answers
// from between are not believed when a socket was replaced. Their length is bounded.
package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Client sends commands to one control daemon.
type Client struct {
	// Command returns NVIDIA's program, which reads commands from its standard
	// input, set up to reach the daemon.
	Command func(ctx context.Context) *exec.Cmd
	// Check returns an error if the program would not reach the daemon, but another
	// process.
	Check func() error
	// Limit is how long one run of the program may take.
	Limit time.Duration
}

// run sends commands, one a line, and returns the lines of all answers. NVIDIA's
// program succeeds as soon as it has reached the daemon: whether a command failed
// is in its answer, or must be queried.
func (c Client) run(ctx context.Context, commands ...string) ([]string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Limit, fmt.Errorf("no answer within %s", c.Limit))
	defer cancel()
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("MPS command %q: %w", strings.Join(commands, "; "), err)
	}
	cmd := c.Command(ctx)
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	var output boundedBuffer
	cmd.Stdout, cmd.Stderr = &output, &output
	err := cmd.Run()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	klog.FromContext(ctx).V(4).Info("MPS command", "commands", commands, "answer", output.String(), "failure", err)
	if err != nil {
		return nil, fmt.Errorf("MPS command %q: %w%s", strings.Join(commands, "; "), err, printed(output.String()))
	}
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("MPS command %q was answered: %w", strings.Join(commands, "; "), err)
	}
	var lines []string
	for line := range strings.Lines(output.String()) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// boundedBuffer keeps the first maxOutput bytes that are written to it.
type boundedBuffer struct{ buffer bytes.Buffer }

// maxOutput has room for everything that a daemon can have to answer.
const maxOutput = 64 << 10

func (b *boundedBuffer) Write(data []byte) (int, error) {
	_, _ = b.buffer.Write(data[:min(len(data), maxOutput-b.buffer.Len())])
	return len(data), nil
}

func (b *boundedBuffer) String() string { return b.buffer.String() }

// printed formats what a program printed as the end of an error. It returns nothing
// if the program printed nothing.
func printed(output string) string {
	if output = strings.TrimSpace(output); output == "" {
		return ""
	}
	return ": output " + quote.Text(output)
}

// StartServer asks the daemon to start a server that runs as root. It may answer before the server runs.
func (c Client) StartServer(ctx context.Context) error {
	_, err := c.run(ctx, "start_server -uid 0")
	return err
}

// ShutdownServer asks the daemon to end a server, whether it has clients or not.
func (c Client) ShutdownServer(ctx context.Context, server int) error {
	_, err := c.run(ctx, fmt.Sprintf("shutdown_server %d -f", server))
	return err
}

// Quit asks the daemon to end its servers and itself. Clients have a second to end.
func (c Client) Quit(ctx context.Context) error {
	_, err := c.run(ctx, "quit -t 1")
	return err
}

// servers returns the PIDs of the daemon's servers.
func (c Client) servers(ctx context.Context) ([]int, error) {
	lines, err := c.run(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	pids, rest := leadingPIDs(lines)
	if len(rest) > 0 {
		return nil, fmt.Errorf(`MPS command "get_server_list": want PIDs%s`, printed(strings.Join(lines, "\n")))
	}
	return pids, nil
}

// State is what the daemon says of a server.
type State string

// States of MPS that matter here. There is also INITIALIZING.
const (
	StateActive State = "ACTIVE"
	StateFault  State = "FAULT"
)

// maxState bounds the length of an unknown state.
const maxState = 64

func parseState(answer string) State {
	words := strings.FieldsFunc(strings.ToUpper(answer), func(r rune) bool { return r < 'A' || r > 'Z' })
	for _, s := range []State{StateActive, StateFault} {
		if slices.Contains(words, string(s)) {
			return s
		}
	}
	return State(answer[:min(len(answer), maxState)])
}

// Terminate ends what a client has on the GPU, busy or not, and returns when the server has
// done so; from then on the client's process may be killed without harm to others (NVIDIA's
// MPS documentation, "Client Early Termination"). The process itself goes on, with the error
// CUDA_ERROR_MPS_CLIENT_TERMINATED for every call.
func (c Client) Terminate(ctx context.Context, server, client int) error {
	lines, err := c.run(ctx, fmt.Sprintf("terminate_client %d %d", server, client))
	if err != nil {
		return err
	}
	if answer := strings.Join(lines, "\n"); !succeeded(answer) {
		return fmt.Errorf(`MPS command "terminate_client %d %d": want CUDA_SUCCESS%s`, server, client, printed(answer))
	}
	return nil
}

// succeeded reports whether an answer is CUDA_SUCCESS, which is 0. Its form is not
// documented; other commands that succeed answer nothing.
func succeeded(answer string) bool {
	return answer == "" || answer == "0" || strings.Contains(answer, "CUDA_SUCCESS")
}

func leadingPIDs(lines []string) (pids []int, rest []string) {
	for i, line := range lines {
		pid, err := strconv.Atoi(line)
		if err != nil {
			return pids, lines[i:]
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// SetLimits sets the limits of a spec for servers, where 0 means future ones, and
// reads them back. It does all with one run of the program: the answers to the
// queries are the last lines. The error wraps ErrNoPriorities if the spec has a client
// priority and the daemon has none; then nothing was set.
func (c Client) SetLimits(ctx context.Context, spec mps.Spec, servers ...int) error {
	if spec.ClientPriority != "" {
		if err := c.checkPriorities(ctx); err != nil {
			return err
		}
	}
	var commands []string
	var all []limit
	for _, server := range servers {
		limits := limitsOf(server, spec)
		for _, l := range limits {
			commands = append(commands, l.set)
		}
		all = append(all, limits...)
	}
	asked := queries(all)
	lines, err := c.run(ctx, slices.Concat(commands, asked)...)
	if err != nil {
		return fmt.Errorf("set limits: %w", err)
	}
	if len(lines) < len(asked) {
		return fmt.Errorf("read limits: MPS command %q: want %d answers%s", strings.Join(asked, "; "), len(asked), printed(strings.Join(lines, "\n")))
	}
	answers, each := lines[len(lines)-len(asked):], len(asked)/len(servers)
	for i, server := range servers {
		differs, err := compare(all[i*each:(i+1)*each], answers[i*each:])
		if err == nil && differs != "" {
			err = errors.New(differs)
		}
		if err != nil {
			whose := "future servers"
			if server != 0 {
				whose = "the server with PID " + strconv.Itoa(server)
			}
			return fmt.Errorf("the limits of %s are not in effect: %w%s", whose, err, printed(strings.Join(lines, "\n")))
		}
	}
	return nil
}
