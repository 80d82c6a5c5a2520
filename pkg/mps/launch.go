// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host"
)

// LaunchCommand is the sub-command by which a supervisor runs its own program again
// in order to call Launch with the rest of the arguments. Whoever uses a Supervisor
// must have it.
const LaunchCommand = "launch"

// programName of NVIDIA's control daemon, which is also the client that sends
// commands to it.
const programName = "nvidia-cuda-mps-control"

// self is this program, even if its file was replaced since.
const self = "/proc/self/exe"

// inRoot is where programs that run in a root of their own find the session's
// folder: the root may be read-only and know nothing of ours.
const inRoot folder = "/tmp"

// launch says how to run a program of the driver for a session.
type launch struct {
	// Shm replaces /dev/shm, unless it is empty.
	shm string
	// Root is changed to, unless it is empty; Session then replaces its /tmp.
	root, session string
}

// Launch replaces this process by a program of the driver, with a view of the file
// system of its own. It returns only if it fails.
//
// Mounts and chroot are per thread until the new program starts, so that this needs
// a process that does nothing else, which is why the supervisor starts itself.
func Launch(args []string) error {
	var l launch
	flags := flag.NewFlagSet(LaunchCommand, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&l.shm, "shm", "", "")
	flags.StringVar(&l.root, "root", "", "")
	flags.StringVar(&l.session, "session", "", "")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%s: %w", LaunchCommand, err)
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("%s: want a program; only the supervisor uses this", LaunchCommand)
	}
	runtime.LockOSThread()
	if err := l.enter(); err != nil {
		return fmt.Errorf("prepare the file system for %s: %w", flags.Arg(0), err)
	}
	return fmt.Errorf("run %s: %w", flags.Arg(0), unix.Exec(flags.Arg(0), flags.Args(), os.Environ()))
}

func (l launch) enter() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Nothing goes out, but what the host unmounts must go here too: a mount that
	// stays in here would keep its file system busy for as long as the daemon runs.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	if l.shm != "" {
		if err := bind(l.shm, filepath.Join("/", l.root, "dev/shm")); err != nil {
			return err
		}
	}
	if l.root == "" {
		return nil
	}
	if err := bind(l.session, filepath.Join(l.root, string(inRoot))); err != nil {
		return err
	}
	if err := unix.Chroot(l.root); err != nil {
		return fmt.Errorf("change root to %s: %w", l.root, err)
	}
	return unix.Chdir("/")
}

func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", from, to, err)
	}
	return nil
}

// arguments of this program that make it run another one: the inverse of what
// Launch parses.
func (l launch) arguments(program string, args ...string) []string {
	all := []string{LaunchCommand, "-shm", l.shm, "-root", l.root, "-session", l.session, "--", program}
	return append(all, args...)
}

// view is how NVIDIA's program sees a session.
type view struct {
	folder  folder
	program host.Program
}

func (s *Supervisor) view(f folder) (view, error) {
	program, err := s.options.Roots.Program(programName)
	if err != nil {
		return view{}, fmt.Errorf("MPS of this node's driver: %w", err)
	}
	return view{folder: f, program: program}, nil
}

func (v view) environment() []string {
	seen := v.folder
	if v.program.Root != "" {
		seen = inRoot
	}
	env := append([]string(nil), v.program.Env...)
	return append(env, "CUDA_MPS_PIPE_DIRECTORY="+seen.pipe(), "CUDA_MPS_LOG_DIRECTORY="+seen.log())
}

// daemon is the command that becomes the control daemon.
func (v view) daemon(spec Spec) *exec.Cmd {
	args := []string{"-f"}
	if spec.MultiUser {
		args = append(args, "-multiuser-server")
	}
	l := launch{shm: v.folder.shm(), root: v.program.Root, session: string(v.folder)}
	// It must not end with any context: others wait for it by its own end.
	cmd := exec.Command(self, l.arguments(v.program.Path, args...)...) //nolint:noctx // as said
	cmd.Dir = "/"
	cmd.Env = append(v.environment(), "CUDA_VISIBLE_DEVICES="+join(spec.Devices), v.folder.marker())
	return cmd
}

// client is the command that reads commands from its standard input.
func (v view) client(ctx context.Context) *exec.Cmd {
	var cmd *exec.Cmd
	if v.program.Root == "" {
		cmd = v.program.Command(ctx)
	} else {
		l := launch{root: v.program.Root, session: string(v.folder)}
		cmd = host.Program{Path: self}.Command(ctx, l.arguments(v.program.Path)...)
	}
	cmd.Env = v.environment()
	cmd.WaitDelay = time.Second
	return cmd
}

// openLog starts the log that has what launcher and daemon print. What earlier
// daemons wrote is kept aside, once.
func (f folder) openLog() (*os.File, error) {
	for _, name := range logNames {
		path := filepath.Join(f.log(), name)
		if err := os.Rename(path, path+".old"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("put a log aside: %w", err)
		}
	}
	file, err := os.OpenFile(filepath.Join(f.log(), daemonLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("make the daemon's log: %w", err)
	}
	return file, nil
}
