// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor"
	mpsprocess "github.com/partage-dev/partage/pkg/process"
	"github.com/partage-dev/partage/pkg/wait"
)

// lab is a control daemon of MPS that nobody else uses, in a folder of its own, on a
// device in compute mode DEFAULT. It is started as the supervisor starts one.
type lab struct {
	roots   host.Roots
	folder  string
	program string // cuda-probe

	// mu is held by one question at a time. One that was left behind keeps it.
	mu     sync.Mutex
	mps    *supervisor.Unsupervised
	device string        // UUID
	daemon *exec.Cmd     // its keeper
	ended  chan struct{} // closed when all that it has started has ended
	server mpsprocess.ID
	held   map[string]*probe.Process
}

func newLab(o Options) *lab {
	return &lab{roots: o.Roots, folder: filepath.Join(o.WorkDir, "partage-mps"), program: o.Probe, held: map[string]*probe.Process{}}
}

// daemonStart is how a daemon and its server started.
type daemonStart struct {
	// DaemonTook and ServerTook are until the first answer, and then until the server
	// was active.
	DaemonTook string `json:"daemonTook"`
	ServerTook string `json:"serverTook"`
}

// start starts the daemon for a device and its server. What an earlier run left in the
// folder goes.
func (l *lab) start(ctx context.Context, device string) (daemonStart, error) {
	if err := l.clear(ctx); err != nil {
		return daemonStart{}, err
	}
	programs, err := supervisor.NewUnsupervised(l.roots, l.folder)
	if err != nil {
		return daemonStart{}, err
	}
	log, err := os.OpenFile(l.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return daemonStart{}, fmt.Errorf("log of the control daemon: %w", err)
	}
	cmd := programs.Daemon(mps.Spec{ID: "conformance", Devices: []string{device}, MultiUser: true})
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	began := time.Now()
	if err := errors.Join(cmd.Start(), log.Close()); err != nil {
		return daemonStart{}, fmt.Errorf("start the control daemon: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	l.mps, l.device, l.daemon, l.ended = &programs, device, cmd, ended
	var took daemonStart
	if err := l.awaitAnswer(ctx); err != nil {
		return took, fmt.Errorf("the control daemon does not answer: %w%s", err, l.tail())
	}
	took.DaemonTook = duration(began)
	began = time.Now()
	if err := l.startServer(ctx); err != nil {
		return took, fmt.Errorf("the server does not start: %w%s", err, l.tail())
	}
	took.ServerTook = duration(began)
	return took, nil
}

func duration(since time.Time) string { return time.Since(since).Round(time.Millisecond).String() }

func (l *lab) log() string { return filepath.Join(l.folder, "log", "output") }

// tail returns the end of what the daemon printed, as the end of an error.
func (l *lab) tail() string {
	data, err := os.ReadFile(l.log())
	if err != nil || len(data) == 0 {
		return ""
	}
	const most = 400
	text := string(data[max(0, len(data)-most):])
	return fmt.Sprintf(": it printed %q", strings.TrimSpace(text))
}

func (l *lab) awaitAnswer(ctx context.Context) error {
	return wait.Until(ctx, func() (bool, error) {
		select {
		case <-l.ended:
			return false, errors.New("it has ended")
		default:
		}
		if _, err := os.Stat(filepath.Join(l.mps.DaemonPipe, "control")); err != nil {
			return false, nil //nolint:nilerr // it is still starting
		}
		_, err := l.run(ctx, "get_server_list")
		return err == nil, nil
	})
}

// startServer asks for a server and waits until it is active. An earlier one may still
// be listed.
func (l *lab) startServer(ctx context.Context) error {
	if _, err := l.run(ctx, "start_server -uid 0"); err != nil {
		return err
	}
	return l.awaitServer(ctx)
}

// awaitServer waits for another server than l.server.
func (l *lab) awaitServer(ctx context.Context) error {
	seen, old := false, l.server
	return wait.Until(ctx, func() (bool, error) {
		answer, err := l.run(ctx, "get_server_list")
		if err != nil {
			return false, err
		}
		pid, err := strconv.Atoi(strings.TrimSpace(answer))
		if err != nil {
			if seen {
				return false, errors.New("it has ended")
			}
			return false, nil // there is none yet
		}
		if pid == old.PID {
			return false, nil
		}
		id, err := l.serverID(pid)
		if id.PID == 0 || err != nil {
			return false, err
		}
		seen, l.server = true, id
		state, err := l.run(ctx, "get_server_status "+strconv.Itoa(pid))
		return err == nil && strings.Contains(strings.ToUpper(state), "ACTIVE"), nil
	})
}

// serverID identifies a process that the daemon calls its server, or nothing if it has just
// ended. Servers are killed here, and a daemon that is wrong could call any process of the
// node its server, or -1, which is all of them.
func (l *lab) serverID(pid int) (mpsprocess.ID, error) {
	id, err := mpsprocess.Identify(pid)
	if pid > 0 && errors.Is(err, fs.ErrNotExist) {
		return mpsprocess.ID{}, nil
	}
	if err == nil {
		var kept mpsprocess.ID
		kept, err = mpsprocess.Identify(l.daemon.Process.Pid)
		if err == nil && !id.DescendsFrom(kept) {
			err = fs.ErrInvalid
		}
	}
	if err != nil {
		return mpsprocess.ID{}, fmt.Errorf("get_server_list answers %d, which is no process of this daemon", pid)
	}
	return id, nil
}

// control returns the process of the control daemon, which its keeper has started.
func (l *lab) control() (mpsprocess.ID, error) {
	kept, err := mpsprocess.Children(l.daemon.Process.Pid)
	if err == nil && len(kept) == 0 {
		err = errors.New("the control daemon has ended")
	}
	if err != nil {
		return mpsprocess.ID{}, err
	}
	return mpsprocess.Identify(kept[0])
}

// run sends one command to the daemon and returns the answer as it was printed.
func (l *lab) run(ctx context.Context, command string) (string, error) {
	if l.mps == nil {
		return "", errors.New("there is no control daemon")
	}
	daemon, err := l.control()
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	cmd, err := l.mps.Client(ctx, daemon)
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	cmd.Stdin = strings.NewReader(command + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: output %q", command, err, out)
	}
	return string(out), nil
}

// serverWord stands for the server's PID in commands and answers.
const serverWord = "SERVER"

// command sends a command in which serverWord stands for the server.
func (l *lab) command(ctx context.Context, text string) (string, error) {
	answer, err := l.run(ctx, strings.ReplaceAll(text, serverWord, strconv.Itoa(l.server.PID)))
	return strings.TrimRight(answer, "\n"), err
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
}

const firstUser = 100000 // of user namespaces, as the kubelet gives them

func (l *lab) client(s surroundings, o probe.Options) (probe.Program, probe.Options, error) {
	if l.mps == nil {
		return probe.Program{}, o, errors.New("there is no control daemon")
	}
	library, err := l.roots.CUDALibraryPath()
	if err != nil {
		return probe.Program{}, o, err
	}
	pipe := s.pipe
	if pipe == "" {
		pipe = l.mps.DaemonPipe
	}
	o.Library = library
	if nodes := l.roots.DevRoot().Path; nodes != "/" {
		o.DevRoot = nodes
	}
	if !s.ownMemory {
		o.SharedMemory = l.mps.SharedMemory
	}
	program := probe.Program{
		Path: l.program, Device: l.device, Env: append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + pipe}, s.env...), Namespaces: s.namespaces, FirstUser: firstUser,
	}
	return program, o, nil
}

// alone describes a CUDA program on a device, without MPS.
func (l *lab) alone(device string) (probe.Program, probe.Options, error) {
	library, err := l.roots.CUDALibraryPath()
	if err != nil {
		return probe.Program{}, probe.Options{}, err
	}
	o := probe.Options{Library: library}
	if nodes := l.roots.DevRoot().Path; nodes != "/" {
		o.DevRoot = nodes
	}
	return probe.Program{Path: l.program, Device: device, Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}}, o, nil
}

// probe runs a CUDA program to its end.
func (l *lab) probe(ctx context.Context, s surroundings, o probe.Options) ([]probe.Event, error) {
	program, o, err := l.client(s, o)
	if err != nil {
		return nil, err
	}
	return program.Run(ctx, o)
}

// hold starts a CUDA program and waits until it has its context. It is kept under a name.
func (l *lab) hold(ctx context.Context, name string, s surroundings, o probe.Options) error {
	program, o, err := l.client(s, o)
	if err != nil {
		return err
	}
	run, err := program.Start(context.WithoutCancel(ctx), o)
	if err != nil {
		return err
	}
	l.held[name] = run
	events, err := run.Until(ctx, probe.Holding)
	if e, failed := probe.Find(events, probe.Failed); err == nil && failed {
		err = fmt.Errorf("%s: %s", e.Call, e.Result)
	}
	return err
}

// release takes a program out of those that are held.
func (l *lab) release(name string) (*probe.Process, error) {
	run, ok := l.held[name]
	if !ok {
		return nil, fmt.Errorf("the program %s does not run", name)
	}
	delete(l.held, name)
	return run, nil
}

// clear ends everything that belongs to the folder, and removes it.
func (l *lab) clear(ctx context.Context) error {
	for name, run := range l.held {
		delete(l.held, name)
		if _, err := run.Kill(ctx); err != nil {
			return fmt.Errorf("end the CUDA program %s: %w", name, err)
		}
	}
	if l.mps != nil {
		_, _ = l.run(ctx, "quit -t 1") // what is left is killed
	}
	if err := l.sweep(ctx); err != nil {
		return err
	}
	if l.ended != nil {
		_ = l.daemon.Process.Signal(syscall.SIGTERM) // it may not have come to be found
		select {
		case <-l.ended:
		case <-ctx.Done():
			return fmt.Errorf("the control daemon does not end: %w", context.Cause(ctx))
		}
	}
	l.mps, l.device, l.daemon, l.ended, l.server = nil, "", nil, nil, mpsprocess.ID{}
	return host.RemoveTree(ctx, l.folder)
}

// sweep ends what is left of MPS, also of a run that was killed: its server may have gone
// on, and keeps the GPU.
func (l *lab) sweep(ctx context.Context) error {
	if err := supervisor.EndUnsupervised(ctx, l.folder); err != nil {
		return fmt.Errorf("end MPS in %s: %w", l.folder, err)
	}
	return nil
}

// endLimit is how long the end of MPS may take.
const endLimit = 30 * time.Second

// closeLab ends what part B has started.
func (n *Node) closeLab() error {
	if !slices.Contains(n.Parts, MPS) && !slices.Contains(n.Parts, Intrusive) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	err := n.clearLab(ctx)
	if n.subject.gpu == nil {
		return err
	}
	// Whatever was left behind, the GPU is put back, now or by the next run.
	return errors.Join(err, n.undo(ctx, n.hardware))
}

func (n *Node) clearLab(ctx context.Context) error {
	// A question that was left behind has the lab. It ends with its context.
	err := wait.Until(ctx, func() (bool, error) { return n.lab.mu.TryLock(), nil })
	if err != nil {
		return fmt.Errorf("MPS in %s may go on: a question to it has not ended: %w", n.lab.folder, err)
	}
	defer n.lab.mu.Unlock()
	if n.lab.mps == nil {
		return nil
	}
	return n.lab.clear(ctx)
}
