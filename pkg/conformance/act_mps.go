// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// daemon is a control daemon of MPS that nobody else uses, in a folder of its own, on a
// device in compute mode DEFAULT. It is started as the supervisor starts one.
type daemon struct {
	roots  host.Roots
	folder string
	probe  string // cuda-probe

	// mu is held by one question at a time. One that was left behind keeps it.
	mu     sync.Mutex
	mps    *supervisor.Unsupervised // nil while there is none
	device string                   // UUID
	keeper process.ID               // ends with all that it has started
	server process.ID
}

// onDaemon puts a question to the daemon.
func onDaemon[T any](q *inquiry, kind Kind, question string, answer func(context.Context, *daemon) (T, error)) T {
	return do(q, kind, question, func(ctx context.Context, m *machine) (T, error) {
		m.daemon.mu.Lock()
		defer m.daemon.mu.Unlock()
		return answer(ctx, m.daemon)
	})
}

// daemonStart is how long a daemon took until its first answer, and then its server until it was active.
type daemonStart struct {
	DaemonTook string `json:"daemonTook"`
	ServerTook string `json:"serverTook"`
}

// start starts the daemon for a device and its server. What an earlier run left in the
// folder goes.
func (d *daemon) start(ctx context.Context, device string) (took daemonStart, err error) {
	if err := d.clear(ctx); err != nil {
		return took, err
	}
	programs, err := supervisor.NewUnsupervised(d.roots, d.folder)
	if err != nil {
		return took, err
	}
	log, err := os.Create(filepath.Join(d.folder, "log", "output")) // NVIDIA's own logs say less when it does not start
	if err != nil {
		return took, fmt.Errorf("log of the control daemon: %w", err)
	}
	defer func() {
		if printed, readErr := os.ReadFile(log.Name()); err != nil && readErr == nil && len(printed) > 0 {
			err = fmt.Errorf("%w: it printed %q", err, bytes.TrimSpace(printed[max(0, len(printed)-400):]))
		}
	}()
	cmd := programs.Daemon(mps.Spec{ID: "conformance", Devices: []string{device}, MultiUser: true})
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	began := time.Now()
	if err := errors.Join(cmd.Start(), log.Close()); err != nil {
		return took, fmt.Errorf("start the control daemon: %w", err)
	}
	d.keeper, err = process.Identify(cmd.Process.Pid) // it was not waited for yet
	go func() { _ = cmd.Wait() }()
	if err != nil {
		return took, errors.Join(err, cmd.Process.Kill())
	}
	d.mps, d.device = &programs, device
	if err := wait.Until(ctx, func() (bool, error) {
		if !d.keeper.Alive() {
			return false, errors.New("it has ended")
		}
		_, err := d.command(ctx, "get_server_list")
		return err == nil, nil
	}); err != nil {
		return took, fmt.Errorf("the control daemon does not answer: %w", err)
	}
	answered := time.Now()
	if _, err = d.command(ctx, "start_server -uid 0"); err == nil {
		err = d.awaitServer(ctx)
	}
	if err != nil {
		return took, fmt.Errorf("the server does not start: %w", err)
	}
	return daemonStart{answered.Sub(began).Round(time.Millisecond).String(), time.Since(answered).Round(time.Millisecond).String()}, nil
}

// awaitServer waits for another server than d.server.
func (d *daemon) awaitServer(ctx context.Context) error {
	old := d.server
	return wait.Until(ctx, func() (bool, error) {
		answer, err := d.command(ctx, "get_server_list")
		if err != nil {
			return false, err
		}
		pid, err := strconv.Atoi(answer)
		switch {
		case err != nil && d.server != old:
			return false, errors.New("it has ended")
		case err != nil || pid == old.PID:
			return false, nil //nolint:nilerr // there is none yet
		}
		id, err := d.serverID(pid)
		if id.PID == 0 || err != nil {
			return false, err
		}
		d.server = id
		state, err := d.command(ctx, "get_server_status SERVER")
		return err == nil && isActive(state), nil
	})
}

// isActive reads the answer to get_server_status.
func isActive(state string) bool { return strings.Contains(strings.ToUpper(state), "ACTIVE") }

// serverID identifies a process that the daemon calls its server, or nothing if it has just
// ended. Servers are killed here, and a daemon that is wrong could call any process of the
// node its server, or -1, which is all of them.
func (d *daemon) serverID(pid int) (process.ID, error) {
	id, err := process.Identify(pid)
	if pid > 0 && errors.Is(err, fs.ErrNotExist) {
		return process.ID{}, nil
	}
	if err != nil || !id.DescendsFrom(d.keeper) {
		return process.ID{}, fmt.Errorf("get_server_list answers %d, which is no process of this daemon", pid)
	}
	return id, nil
}

var errNoDaemon = errors.New("there is no control daemon")

// control returns the process of the control daemon, which its keeper has started.
func (d *daemon) control() (process.ID, error) {
	if d.mps == nil {
		return process.ID{}, errNoDaemon
	}
	kept, err := process.Children(d.keeper.PID)
	if err == nil && len(kept) == 0 {
		err = errors.New("the control daemon has ended")
	}
	if err != nil {
		return process.ID{}, err
	}
	return process.Identify(kept[0])
}

// serverWord stands for the server's PID in commands and answers.
const serverWord = "SERVER"

// command sends a command, in which serverWord stands for the server, and returns the answer
// as it was printed.
func (d *daemon) command(ctx context.Context, text string) (string, error) {
	text = strings.ReplaceAll(text, serverWord, strconv.Itoa(d.server.PID))
	control, err := d.control()
	if err != nil {
		return "", fmt.Errorf("%s: %w", text, err)
	}
	cmd, err := d.mps.Client(ctx, control)
	if err != nil {
		return "", fmt.Errorf("%s: %w", text, err)
	}
	cmd.Stdin = strings.NewReader(text + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: output %q", text, err, out)
	}
	return strings.TrimRight(string(out), "\n"), nil
}

// surroundings are what a CUDA program finds. The zero value is a container with a
// share of the device.
type surroundings struct {
	// pipe is the pipe folder; by default the daemon's.
	pipe string
	// ownMemory leaves the program the /dev/shm of this process.
	ownMemory bool
	env       []string
	// namespaces are those that a container has of its own.
	namespaces uintptr
	// device is another one than the daemon's, for a program without MPS.
	device string
}

// Pipe folders: one without a daemon, and one in which is nothing but a link to the socket control.
const (
	nowhere      = "/nonexistent"
	controlAlone = "control alone"
)

// launch starts a CUDA program. ctx kills it.
func (d *daemon) launch(ctx context.Context, s surroundings, o probe.Options) (_ *probe.Process, err error) {
	if o.Library, err = d.roots.CUDALibraryPath(); err != nil {
		return nil, err
	}
	if nodes := d.roots.DevRoot().Path; nodes != "/" {
		o.DevRoot = nodes
	}
	if d.mps == nil && s.pipe != nowhere {
		return nil, errNoDaemon
	}
	pipe := s.pipe
	if d.mps != nil {
		if pipe = cmp.Or(pipe, d.mps.DaemonPipe); pipe == controlAlone {
			pipe = d.mps.ClientPipe
		}
		if !s.ownMemory {
			o.SharedMemory = d.mps.SharedMemory
		}
	}
	program := probe.Program{
		Path: d.probe, Device: cmp.Or(s.device, d.device), Env: append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + pipe}, s.env...),
		Namespaces: s.namespaces,
	}
	return program.Start(ctx, o)
}

// run runs a CUDA program to its end.
func (d *daemon) run(ctx context.Context, s surroundings, o probe.Options) ([]probe.Event, error) {
	run, err := d.launch(ctx, s, o)
	if err != nil {
		return nil, err
	}
	return run.Finish(ctx)
}

// hold starts a CUDA program and waits until it has its context.
func (d *daemon) hold(ctx context.Context, s surroundings, o probe.Options) (*probe.Process, error) {
	run, err := d.launch(ctx, s, o)
	if err != nil {
		return nil, err
	}
	events, err := run.Until(ctx, probe.Holding)
	return run, cmp.Or(err, refusal(events))
}

// quit ends the daemon, and says what did not end.
func (d *daemon) quit(ctx context.Context) (string, error) {
	if _, err := d.command(ctx, "quit -t 1"); err != nil {
		return "", err
	}
	if err := wait.Until(ctx, func() (bool, error) { return !d.keeper.Alive() && !d.server.Alive(), nil }); err != nil {
		return "daemon or server go on", nil //nolint:nilerr // that is the answer
	}
	return "", nil
}

// sweep ends what is left of MPS, also of a run that was killed: its server may have gone
// on, and keeps the GPU.
func (d *daemon) sweep(ctx context.Context) error {
	if err := supervisor.EndUnsupervised(ctx, d.folder); err != nil {
		return fmt.Errorf("end MPS in %s: %w", d.folder, err)
	}
	return nil
}

// clear ends everything that belongs to the folder, and removes it.
func (d *daemon) clear(ctx context.Context) error {
	if d.mps != nil {
		_, _ = d.command(ctx, "quit -t 1") // what is left is killed
	}
	if err := d.sweep(ctx); err != nil {
		return err
	}
	if d.mps != nil {
		err := d.keeper.Signal(unix.SIGTERM) // it may not have come to be found
		if err == nil {
			err = wait.Until(ctx, func() (bool, error) { return !d.keeper.Alive(), nil })
		}
		if err != nil {
			return fmt.Errorf("the control daemon does not end: %w", err)
		}
	}
	d.mps, d.device, d.keeper, d.server = nil, "", process.ID{}, process.ID{}
	return host.RemoveTree(ctx, d.folder)
}

// close ends the daemon if there is one. A question that was left behind has it until the
// question's context ends.
func (d *daemon) close(ctx context.Context) error {
	err := wait.Until(ctx, func() (bool, error) { return d.mu.TryLock(), nil })
	if err != nil {
		return fmt.Errorf("MPS in %s may go on: a question to it has not ended: %w", d.folder, err)
	}
	defer d.mu.Unlock()
	if d.mps == nil {
		return nil
	}
	return d.clear(ctx)
}
