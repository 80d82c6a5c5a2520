// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// asNobody runs fn on a thread whose effective user is not root. The thread is
// not used again.
func asNobody(t *testing.T, fn func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock: the thread ends with us
		// The raw call changes this thread only.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); errno != 0 {
			t.Errorf("become nobody: %v", errno)
			return
		}
		fn()
	}()
	<-done
}
