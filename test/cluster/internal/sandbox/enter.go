// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ExitStatus is the status of a command that ended with another one than 0.
type ExitStatus int

// Error implements error.
func (e ExitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Namespace is one kind of a node's namespaces.
type Namespace struct {
	file string
	flag int
}

var network = Namespace{"net", unix.CLONE_NEWNET}

// All are a node's namespaces. That of mounts comes last, the paths of the others are the machine's.
var All = []Namespace{
	{"cgroup", unix.CLONE_NEWCGROUP}, {"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS},
	network, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS},
}

// NetworkOnly leaves a command the machine's files and processes.
var NetworkOnly = []Namespace{network}

// Run runs cmd inside namespaces of the node whose first process is pid, and returns when it has ended. Its Path need not be
// set, Args[0] is looked up inside. The command stays in the caller's session, so terminals work as usual. A status other than
// 0 is an ExitStatus; for a signal, 128 and its number.
func Run(ctx context.Context, pid int, namespaces []Namespace, cmd *exec.Cmd) error {
	result := make(chan error, 1)
	go func() {
		// Never unlocked: the thread, which is in the node's namespaces now, ends with the goroutine.
		runtime.LockOSThread()
		if err := enter(pid, namespaces); err != nil {
			result <- err
			return
		}
		result <- start(cmd)
	}()
	if err := <-result; err != nil {
		return err
	}
	return wait(ctx, cmd)
}

// enter moves the calling thread. Only its children are in the node's pid namespace.
func enter(pid int, namespaces []Namespace) error {
	fds := make([]int, len(namespaces))
	for i, ns := range namespaces {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, ns.file), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open the %s namespace of process %d: %w", ns.file, pid, err)
		}
		defer unix.Close(fd)
		fds[i] = fd
	}
	// A thread that shares its root and working folder with others cannot change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("separate a thread's folders: %w", err)
	}
	for i, ns := range namespaces {
		if err := unix.Setns(fds[i], ns.flag); err != nil {
			return fmt.Errorf("enter the %s namespace of process %d: %w", ns.file, pid, err)
		}
	}
	return nil
}

// start runs on the moved thread: files are the node's.
func start(cmd *exec.Cmd) error {
	path, err := find(cmd.Args[0], cmd.Dir, cmd.Env)
	if err != nil {
		return err
	}
	cmd.Path, cmd.Err = path, nil
	if fi, err := os.Stat(cmd.Dir); err != nil || !fi.IsDir() {
		cmd.Dir = "/"
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s in the node: %w", path, err)
	}
	return nil
}

func find(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, nil
	}
	for _, e := range slices.Backward(env) { // the last of a name counts, as for os/exec
		path, ok := strings.CutPrefix(e, "PATH=")
		if !ok {
			continue
		}
		for _, d := range filepath.SplitList(path) {
			if file := filepath.Join(d, name); d != "" && unix.Access(file, unix.X_OK) == nil {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// wait passes signals on, until the command has ended. The terminal's own (Ctrl-C, Ctrl-\) reach the command by themselves.
func wait(ctx context.Context, cmd *exec.Cmd) error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(signals)
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case err := <-done:
			return status(err)
		case <-ctx.Done():
			_ = cmd.Process.Signal(unix.SIGTERM)
			return status(<-done)
		case s := <-signals:
			if s == unix.SIGTERM || s == unix.SIGHUP {
				_ = cmd.Process.Signal(s)
			}
		}
	}
}

func status(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if w, ok := exit.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return ExitStatus(128 + int(w.Signal()))
	}
	return ExitStatus(exit.ExitCode())
}
