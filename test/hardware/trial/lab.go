// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/node/host"
	mpsprocess "github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/hardware/bounded"
)

// controlName is NVIDIA's control daemon, and the client that sends commands to it.
const controlName = "nvidia-cuda-mps-control"

// Options say on what the trials are made.
type Options struct {
	Roots host.Roots
	// GPU is the UUID of the one that MPS runs on.
	GPU string
	// Folder is a private one, with a short path. All files of MPS are in it.
	Folder string
	// Probe is the program cuda-probe.
	Probe string
}

// mark is a variable in the environment of the daemon for a folder, and of all that it starts.
func mark(folder string) string { return "PARTAGE_HARDWARE=" + folder }

// find returns the processes of MPS that were started for a folder. No keeper ends them: how they end is what is looked at.
func find(folder string) (found []mpsprocess.ID, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		return nil, err
	}
	for _, path := range all {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		id, err := mpsprocess.Identify(pid)
		// What cannot be read has ended.
		env, readErr := os.ReadFile(path)
		if err == nil && readErr == nil && id.Alive() && slices.Contains(strings.Split(string(env), "\x00"), mark(folder)) {
			found = append(found, id)
		}
	}
	return found, nil
}

// End ends the processes of MPS that were started for a folder.
func End(ctx context.Context, folder string) error {
	left, err := find(folder)
	for _, id := range left {
		err = errors.Join(err, id.Kill(ctx))
	}
	return err
}

// lab is an MPS daemon of its own.
type lab struct {
	Options

	control host.Program
	library string
	devRoot string
	// private says that this process has a mount namespace and a /dev/shm of its own. Without
	// it nothing can be mounted.
	private error

	// broken says why MPS cannot be started.
	broken error
	daemon *exec.Cmd
	ended  chan struct{}
	server string // its process ID
	whole  int    // multiprocessors of the GPU
}

// newLab finds the programs, and gives this process a /dev/shm of its own where that is
// possible. It is to be called in a mount namespace that only this process has; isolated says
// why there is none.
func newLab(o Options, isolated error) (*lab, error) {
	l := &lab{Options: o, private: isolated}
	var err error
	if l.control, err = o.Roots.Program(controlName); err != nil {
		return nil, err
	}
	if l.control.Root != "" {
		return nil, fmt.Errorf("the driver is a system of its own in %s, where the files of this run are not seen", l.control.Root)
	}
	if l.library, err = o.Roots.CUDALibraryPath(); err != nil {
		return nil, err
	}
	if root := o.Roots.DevRoot().Path; filepath.Clean(root) != "/" {
		l.devRoot = root
	}
	for _, folder := range []string{l.pipe(), l.alonePipe(), l.logs(), l.shm(), l.otherShm()} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, fmt.Errorf("make a folder for MPS: %w", err)
		}
	}
	for _, folder := range []string{l.shm(), l.otherShm()} {
		if err := os.Chmod(folder, 0o777|os.ModeSticky); err != nil {
			return nil, fmt.Errorf("make a folder for MPS: %w", err)
		}
	}
	if l.private == nil {
		l.private = l.ownMemory()
	}
	return l, nil
}

// ownMemory gives this process a /dev/shm of its own.
func (l *lab) ownMemory() error {
	for _, folder := range []string{l.shm(), l.otherShm()} {
		if err := unix.Mount("partage-hardware", folder, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
			return fmt.Errorf("mount a tmpfs: %w", err)
		}
	}
	if err := unix.Mount(l.shm(), "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind a folder to /dev/shm: %w", err)
	}
	return nil
}

func (l *lab) pipe() string      { return filepath.Join(l.Folder, "p") }
func (l *lab) alonePipe() string { return filepath.Join(l.Folder, "a") }
func (l *lab) logs() string      { return filepath.Join(l.Folder, "log") }
func (l *lab) output() string    { return filepath.Join(l.logs(), "output.log") }
func (l *lab) shm() string       { return filepath.Join(l.Folder, "shm") }
func (l *lab) otherShm() string  { return filepath.Join(l.Folder, "other") }

// start starts daemon and server.
func (l *lab) start(ctx context.Context) error {
	log, err := os.OpenFile(l.output(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("log of the control daemon: %w", err)
	}
	args := []string{"-f"}
	if os.Geteuid() == 0 {
		args = append(args, "-multiuser-server")
	}
	// No context ends it: it is asked to end, since a server that is left behind keeps the GPU.
	cmd := exec.Command(l.control.Path, args...) //nolint:noctx // as said
	cmd.Env = append(l.environment(), "CUDA_VISIBLE_DEVICES="+l.GPU, mark(l.Folder))
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := errors.Join(cmd.Start(), log.Close()); err != nil {
		return fmt.Errorf("start the control daemon: %w", err)
	}
	l.daemon, l.ended = cmd, make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(l.ended)
	}()
	answers := func() (bool, error) {
		select {
		case <-l.ended:
			return false, errors.New("it has ended")
		default:
		}
		_, err := l.ask(ctx, "get_server_list")
		return err == nil, nil
	}
	if err := wait.Until(ctx, answers); err != nil {
		return fmt.Errorf("the control daemon does not answer: %w", err)
	}
	if _, err := l.ask(ctx, fmt.Sprintf("start_server -uid %d", os.Geteuid())); err != nil {
		return err
	}
	if err := wait.Until(ctx, func() (bool, error) { return l.active(ctx), nil }); err != nil {
		return fmt.Errorf("the server does not start: %w", err)
	}
	return nil
}

func (l *lab) environment() []string {
	return append(slices.Clone(l.control.Env), "CUDA_MPS_PIPE_DIRECTORY="+l.pipe(), "CUDA_MPS_LOG_DIRECTORY="+l.logs())
}

// active reports whether there is a server, and remembers it.
func (l *lab) active(ctx context.Context) bool {
	list, err := l.ask(ctx, "get_server_list")
	if _, number := strconv.Atoi(list); err != nil || number != nil {
		return false
	}
	l.server = list
	status, err := l.ask(ctx, "get_server_status "+list)
	return err == nil && strings.Contains(strings.ToUpper(status), "ACTIVE")
}

// ask sends a command to the daemon.
func (l *lab) ask(ctx context.Context, command string) (string, error) {
	cmd := l.control.Command(ctx)
	cmd.Env = l.environment()
	return converse(ctx, cmd, command)
}

// askFrom sends a command from a client with another /dev/shm.
func (l *lab) askFrom(ctx context.Context, shm, command string) (string, error) {
	if l.private != nil {
		return "", l.private
	}
	cmd := host.Program{Path: self}.Command(ctx, BindCommand, shm, l.control.Path)
	cmd.Env = l.environment()
	cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	return converse(ctx, cmd, command)
}

func converse(ctx context.Context, cmd *exec.Cmd, command string) (string, error) {
	const outputLimit = 5 * time.Second
	out := &bounded.Output{}
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = strings.NewReader(command+"\n"), out, out, outputLimit
	if err := bounded.Run(ctx, cmd); err != nil {
		return "", fmt.Errorf("%s: %w: output %q", command, err, out)
	}
	return strings.TrimSpace(out.String()), nil
}

const self = "/proc/self/exe"

// BindCommand is the sub-command by which this program runs another one with a folder as
// /dev/shm, in a mount namespace that it has already.
const BindCommand = "bind-shm"

// Bind is BindCommand. It returns only if it fails.
func Bind(shm, program string) error {
	if err := unix.Mount(shm, "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to /dev/shm: %w", shm, err)
	}
	return fmt.Errorf("run %s: %w", program, unix.Exec(program, []string{program}, os.Environ()))
}

// client is how a CUDA program is started.
type client struct {
	pipe       string // by default the daemon's
	env        []string
	namespaces uintptr
	probe.Options
}

func (l *lab) program(c client) (probe.Program, probe.Options) {
	if c.pipe == "" {
		c.pipe = l.pipe()
	}
	c.Library, c.DevRoot = l.library, l.devRoot
	if c.DevRoot != "" && c.SharedMemory == "" { // it gets another /dev, with a /dev/shm of its own
		c.SharedMemory = l.shm()
	}
	env := append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + c.pipe}, c.env...)
	return probe.Program{Path: l.Probe, Device: l.GPU, Env: env, Namespaces: c.namespaces}, c.Options
}

// run runs a CUDA program to its end.
func (l *lab) run(ctx context.Context, c client) ([]probe.Event, error) {
	program, options := l.program(c)
	return program.Run(ctx, options)
}

// hold starts a CUDA program that keeps its context and does nothing. The caller ends it.
func (l *lab) hold(ctx context.Context, c client) (*probe.Process, error) {
	c.Hold = true
	program, options := l.program(c)
	run, err := program.Start(context.WithoutCancel(ctx), options)
	if err != nil {
		return nil, err
	}
	events, err := run.Until(ctx, probe.Holding)
	if e, failed := probe.Find(events, probe.Failed); err == nil && failed {
		err = fmt.Errorf("%s: %s", e.Call, e.Result)
	}
	if err != nil {
		_, _ = run.Kill(ctx)
		return nil, err
	}
	return run, nil
}

// endLimit is how long the end of MPS may take, by itself and then by being killed.
const endLimit = 8 * time.Second

// stop ends daemon and server, and says how they ended. It has a time of its own.
func (l *lab) stop(ctx context.Context) (string, error) {
	ending := context.WithoutCancel(ctx)
	ctx, cancel := context.WithTimeout(ending, endLimit)
	defer cancel()
	how := "both ended with quit -t 1"
	if l.daemon != nil {
		_, err := l.ask(ctx, "quit -t 1")
		select {
		case <-l.ended:
		case <-ctx.Done():
			err = errors.Join(err, errors.New("the daemon goes on"))
		}
		if err != nil {
			how = fmt.Sprintf("quit -t 1: %v; what was left was killed", err)
			_ = l.daemon.Process.Kill()
		}
		l.daemon = nil
	}
	killing, cancelKilling := context.WithTimeout(ending, endLimit)
	defer cancelKilling()
	left, err := find(l.Folder)
	if len(left) > 0 {
		how += fmt.Sprintf("; %d processes were left, and killed", len(left))
	}
	return how, errors.Join(err, End(killing, l.Folder))
}

// ensure gives the next trial a server that works.
func (l *lab) ensure(ctx context.Context) error {
	if l.daemon != nil && l.active(ctx) {
		return nil
	}
	if l.daemon != nil {
		if _, err := l.stop(ctx); err != nil {
			return err
		}
	}
	if l.broken != nil {
		return l.broken
	}
	err := l.start(ctx)
	if err != nil {
		// It costs one trial's time, not all of them.
		l.broken = fmt.Errorf("MPS could not be started: %w%s", err, l.tail())
		return l.broken
	}
	return nil
}

// tail returns the end of what the daemon printed.
func (l *lab) tail() string {
	text, err := os.ReadFile(l.output())
	if err != nil || len(text) == 0 {
		return ""
	}
	const most = 400
	return fmt.Sprintf(": it printed %q", strings.TrimSpace(string(text[max(0, len(text)-most):])))
}
