// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package keeper ends a program together with all that it has started, whatever that is: a keeper is the process that
// starts it and becomes the parent of its orphans (a child subreaper, prctl(2)). When the program ends, or the keeper is
// told to end, it kills its children until it has none. So its own end is that of all of them.
//
// While it lives it has the lock of a file (fcntl(2)). So nobody has to write down that it was started, or look for it:
// the kernel says which process has the lock, and frees it with the process.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/wait"
)

var (
	// ErrKept means that another keeper has the lock.
	ErrKept = errors.New("what an earlier one has started is still there")
	// ErrOrphaned means that the starter of a keeper ended before that had the lock: the next one may have searched for it in vain.
	ErrOrphaned = errors.New("the process that wanted the program has ended")
)

// signaled is what the status of a shell, and of a keeper, begins with that says by which signal a program ended.
const signaled = 128

// retry is when it searches again for children that were not there before. A signal announces nearly all of them.
const retry = time.Second

// Program is what a keeper starts.
type Program struct {
	// Starter is the PID of the process that starts the keeper.
	Starter int
	// Path is that in Root, which is that of this process if it is empty.
	Path, Root string
	Args, Env  []string
	// Prepare is called before, on the thread that starts the program. Optional.
	Prepare func() error
}

// Keep makes this process, which must do nothing else, the keeper of a program, as soon as there is no other. It returns, with
// the status to exit with, when nothing that the program has started is left. A keeper that is killed takes the program along,
// but not what that has started.
func Keep(lock string, program Program) (status int, err error) {
	file, err := take(lock, unix.F_SETLKW)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	// From here on the process that replaces the starter finds this keeper.
	if os.Getppid() != program.Starter {
		return 0, ErrOrphaned
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("become the parent of orphans: %w", err)
	}
	children, told := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
	// Pdeathsig means the thread. Wait would wait for the program only, and take its status from this function.
	runtime.LockOSThread()
	if program.Prepare != nil {
		if err := program.Prepare(); err != nil {
			return 0, err
		}
	}
	started, err := os.StartProcess(program.Path, append([]string{program.Path}, program.Args...), &os.ProcAttr{
		Dir: "/", Env: program.Env, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys: &unix.SysProcAttr{Chroot: program.Root, Setsid: true, Pdeathsig: unix.SIGKILL},
	})
	if err != nil {
		return 0, err
	}
	for ending := false; ; {
		status, ending, err = reap(started.Pid, status, ending)
		if errors.Is(err, unix.ECHILD) {
			return status, nil
		}
		var again <-chan time.Time
		if ending {
			if err := killChildren(); err != nil {
				_, _ = fmt.Fprintln(os.Stderr, err)
			}
			again = time.After(retry)
		}
		select {
		case <-children:
		case <-again:
		case <-told:
			ending = true
		}
	}
}

// reap waits for all children that have ended. It returns the status of the program once that has, and ECHILD when there
// are no children.
func reap(program, status int, ending bool) (int, bool, error) {
	for {
		var end unix.WaitStatus
		pid, err := unix.Wait4(-1, &end, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || pid == 0:
			return status, ending, err
		case pid == program:
			status, ending = end.ExitStatus(), true
			if end.Signaled() {
				status = signaled + int(end.Signal())
			}
		}
	}
}

// killChildren kills this process's children. Nobody else waits for them, so no PID is another's by now. The children of
// those become its own.
func killChildren() error {
	pids, err := process.Children(os.Getpid())
	for _, pid := range pids {
		err = errors.Join(err, unix.Kill(pid, unix.SIGKILL))
	}
	return err
}

// How describes the end of a keeper's program by that of the keeper.
func How(p *process.Process) string {
	if exit := p.Exit(); exit.Known && exit.Status.Exited() && exit.Status.ExitStatus() > signaled {
		s := unix.Signal(exit.Status.ExitStatus() - signaled)
		return fmt.Sprintf("signal %d (%s)", int(s), unix.SignalName(s))
	}
	return p.How()
}

// Of returns the process that has the lock of a file, if there is one.
func Of(lock string) (id process.ID, found bool, err error) {
	file, err := os.Open(lock)
	if errors.Is(err, fs.ErrNotExist) {
		return process.ID{}, false, nil
	}
	if err != nil {
		return process.ID{}, false, err
	}
	defer func() { _ = file.Close() }()
	return holder(file)
}

func holder(file *os.File) (id process.ID, found bool, err error) {
	for {
		wanted := unix.Flock_t{Type: unix.F_WRLCK}
		if err := unix.FcntlFlock(file.Fd(), unix.F_GETLK, &wanted); err != nil {
			return process.ID{}, false, fmt.Errorf("find out who has locked %s: %w", file.Name(), err)
		}
		if wanted.Type == unix.F_UNLCK {
			return process.ID{}, false, nil
		}
		id, err = process.Identify(int(wanted.Pid))
		again := unix.Flock_t{Type: unix.F_WRLCK} // the PID may be another process's by now
		if err == nil && unix.FcntlFlock(file.Fd(), unix.F_GETLK, &again) == nil && again.Pid == wanted.Pid {
			return id, true, nil
		}
		if !errors.Is(err, fs.ErrNotExist) || wanted.Pid <= 0 {
			return process.ID{}, false, fmt.Errorf("process %d has locked %s: %w", wanted.Pid, file.Name(), err)
		}
	}
}

// End ends the keeper that has the lock of a file, and others that are known, and returns when they have ended, with all that
// their programs have started.
func End(ctx context.Context, lock string, known ...process.ID) error {
	for _, id := range known {
		if err := end(ctx, id); err != nil {
			return err
		}
	}
	for {
		id, found, err := Of(lock)
		if !found || err != nil {
			return err
		}
		if err := end(ctx, id); err != nil {
			return err
		}
	}
}

func end(ctx context.Context, id process.ID) error {
	// Also one that was stopped.
	if err := errors.Join(id.Signal(unix.SIGTERM), id.Signal(unix.SIGCONT)); err != nil {
		return err
	}
	if err := wait.Until(ctx, func() (bool, error) { return !id.Alive(), nil }); err != nil {
		return fmt.Errorf("%s, which ends an MPS daemon and its servers, does not end; they may be waiting for the GPU: %w", id, err)
	}
	return nil
}

// Lock keeps others from becoming the keeper of a file that is about to be removed. It returns nil where there is none. Nobody
// else in this process may open the file meanwhile: the lock goes when any descriptor of it is closed (fcntl(2)).
func Lock(lock string) (*os.File, error) {
	file, err := take(lock, unix.F_SETLK)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // see the comment of Lock
	}
	return file, err
}

// take gets the lock of a file, which must be there then, or waits for it, depending on the command.
func take(lock string, command int) (*os.File, error) {
	file, err := os.OpenFile(lock, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	for err = error(unix.EINTR); errors.Is(err, unix.EINTR); {
		err = unix.FcntlFlock(file.Fd(), command, &unix.Flock_t{Type: unix.F_WRLCK})
	}
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		err = ErrKept
	}
	var mine unix.Stat_t
	if err == nil {
		err = unix.Fstat(int(file.Fd()), &mine)
	}
	if err == nil && mine.Nlink == 0 {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", lock, err), file.Close())
	}
	return file, nil
}
