// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// stageVariable says which of the three processes of runAlone this one is. It is not set in the first.
const (
	stageVariable = "PARTAGE_FLOW_STAGE"
	stageInit     = "init"
	stageTests    = "tests"
)

// runAlone lets the tests of this program run where no other test's process is in /proc, and mounts are theirs alone: the
// driver finds by /proc who uses a GPU, and each simulated machine has the same device nodes. Three processes are this
// program: the one that was started, which waits; the first one of the namespaces, which takes over orphans; and the tests,
// in which runAlone returns. Without root there are no namespaces, and the tests skip what needs them.
func runAlone() {
	if os.Geteuid() != 0 || os.Getenv(stageVariable) == stageTests {
		return
	}
	run, next := waitFor, stageInit
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if os.Getenv(stageVariable) == stageInit {
		run, next, attr = reapUntil, stageTests, nil
	}
	// Its child gets a signal when the thread ends that started it, not when the process does.
	runtime.LockOSThread()
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env, cmd.SysProcAttr = append(os.Environ(), stageVariable+"="+next), attr
	code, err := run(cmd)
	if err != nil {
		fmt.Fprintln(os.Stderr, "flow: run the tests in namespaces of their own:", err)
		code = 1
	}
	os.Exit(code)
}

// waitFor returns the exit code of a command.
func waitFor(cmd *exec.Cmd) (int, error) {
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.Exited() {
		err = nil
	}
	return cmd.ProcessState.ExitCode(), err
}

// reapUntil runs a command with a /proc of this PID namespace and waits for all children, including those that others
// have left to the namespace's first process, until the command ends.
func reapUntil(cmd *exec.Cmd) (int, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return 0, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return 0, fmt.Errorf("mount /proc: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for the tests: %w", err)
		case pid == cmd.Process.Pid && status.Signaled():
			return 0, fmt.Errorf("the tests were ended by %v", status.Signal())
		case pid == cmd.Process.Pid:
			return status.ExitStatus(), nil
		}
	}
}
