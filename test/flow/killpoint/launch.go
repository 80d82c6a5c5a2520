// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socketVariable has the number of the open socket that the filter's listener is
// sent through. It makes a test program the launcher of another program.
const socketVariable = "PARTAGE_KILLPOINT_SOCKET"

// LaunchIfAsked must be called at the beginning of TestMain: Start runs the test
// program once more, and there this function becomes the program that is to be
// supervised and does not return. Otherwise it does nothing.
func LaunchIfAsked() {
	number := os.Getenv(socketVariable)
	if number == "" {
		return
	}
	err := launch(number, os.Args[1], os.Args[2:])
	fmt.Fprintln(os.Stderr, "killpoint:", err)
	os.Exit(1)
}

func launch(number, path string, args []string) error {
	socket, err := strconv.Atoi(number)
	if err != nil {
		return fmt.Errorf("%s: %w", socketVariable, err)
	}
	unix.CloseOnExec(socket)
	var environment []string
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, socketVariable+"=") {
			environment = append(environment, entry)
		}
	}
	// The filter holds for this thread. Exec ends all others, so that it then
	// holds for the whole program.
	runtime.LockOSThread()
	listener, errno := install(filter(calls))
	if errno != 0 {
		// The other side tells what happened.
		return unix.Sendmsg(socket, []byte(strconv.Itoa(int(errno))), nil, nil, 0)
	}
	if err := unix.Sendmsg(socket, []byte("0"), unix.UnixRights(listener), nil, 0); err != nil {
		return fmt.Errorf("send the listener: %w", err)
	}
	return fmt.Errorf("run %s: %w", path, syscall.Exec(path, args, environment))
}

// install puts a filter on this thread and returns its listener.
func install(program []unix.SockFilter) (int, unix.Errno) {
	// A filter needs this, or privileges.
	if _, _, errno := unix.Syscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return 0, errno
	}
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// A signal interrupts a call that nobody has looked at, which is then made
	// and counted again, but not one that is counted already.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	listener, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&fprog))) //nolint:gosec // the type has the kernel's layout
	return int(listener), errno
}
