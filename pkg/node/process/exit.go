// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Exit is how a process ended. The status of another process's child is known from Linux
// 6.15 on; before, only if the process is examined before its parent waits for it.
type Exit struct {
	Known bool
	// Status is as wait(2) reports it.
	Status syscall.WaitStatus
}

// Killed reports whether a signal is known to have ended the process.
func (e Exit) Killed() bool { return e.Known && e.Status.Signaled() }

func (e Exit) String() string {
	switch {
	case !e.Known:
		return "exit status unknown, as another process started it"
	case e.Status.Signaled():
		return fmt.Sprintf("signal %d (%s)", int(e.Status.Signal()), unix.SignalName(e.Status.Signal()))
	}
	return fmt.Sprintf("exit status %d", e.Status.ExitStatus())
}

// exit returns how a process ended that has, which pidfd is a descriptor of.
func (id ID) exit(pidfd int) Exit {
	// First where a process is until its parent has waited for it, and then where it is
	// afterwards, so that it cannot be missed in between.
	if st, err := readStat(id.PID); err == nil && st.start == id.Start && st.ended() {
		return Exit{Known: true, Status: syscall.WaitStatus(st.exit)}
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(pidfd, &info); err != nil || info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		return Exit{}
	}
	return Exit{Known: true, Status: syscall.WaitStatus(info.Exit_code)}
}
