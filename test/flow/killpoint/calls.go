// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"slices"

	"golang.org/x/sys/unix"
)

// call is a system call that is an effect, or may be one.
type call struct {
	name   string
	number uintptr
	// when limits it to some values of one argument; nil: always.
	when *condition
	// paths and file are the arguments that say what it is done to; file is -1
	// for a call that takes no open file.
	paths []int
	file  int
	// regular limits it to regular files: writing to a pipe or a socket leaves
	// nothing behind.
	regular bool
}

// condition is about the lower half of an argument. It holds when the argument
// equals value or, with mask, when it has any of the value's bits.
type condition struct {
	argument int
	value    uint32
	mask     bool
}

const (
	// making are the open flags that change something.
	making = unix.O_CREAT | unix.O_TRUNC
	// anySignal has the bits of all signals.
	anySignal = 0x7f
)

// calls are all effects. Those that only some architectures have are in legacy.
var calls = slices.Concat(legacy,
	onPath("mkdirat", unix.SYS_MKDIRAT, 1),
	onPath("mknodat", unix.SYS_MKNODAT, 1),
	onPath("unlinkat", unix.SYS_UNLINKAT, 1),
	onPath("renameat", unix.SYS_RENAMEAT, 1, 3),
	onPath("renameat2", unix.SYS_RENAMEAT2, 1, 3),
	onPath("linkat", unix.SYS_LINKAT, 1, 3),
	onPath("symlinkat", unix.SYS_SYMLINKAT, 0, 2),
	onPath("truncate", unix.SYS_TRUNCATE, 0),
	onPath("fchmodat", unix.SYS_FCHMODAT, 1),
	onPath("fchmodat2", unix.SYS_FCHMODAT2, 1),
	onPath("fchownat", unix.SYS_FCHOWNAT, 1),
	onPath("utimensat", unix.SYS_UTIMENSAT, 1),
	onPath("setxattr", unix.SYS_SETXATTR, 0),
	onPath("lsetxattr", unix.SYS_LSETXATTR, 0),
	onPath("removexattr", unix.SYS_REMOVEXATTR, 0),
	onPath("mount", unix.SYS_MOUNT, 0, 1),
	onPath("umount2", unix.SYS_UMOUNT2, 0),
	onPath("move_mount", unix.SYS_MOVE_MOUNT, 1, 3),
	// Its flags are in memory; few programs use it.
	onPath("openat2", unix.SYS_OPENAT2, 1),
	[]call{{name: "openat", number: unix.SYS_OPENAT, paths: []int{1}, file: -1, when: &condition{2, making, true}}},

	onFile("ftruncate", unix.SYS_FTRUNCATE),
	onFile("fallocate", unix.SYS_FALLOCATE),
	onFile("fchmod", unix.SYS_FCHMOD),
	onFile("fchown", unix.SYS_FCHOWN),
	onFile("fsetxattr", unix.SYS_FSETXATTR),
	onFile("fsync", unix.SYS_FSYNC),
	onFile("fdatasync", unix.SYS_FDATASYNC),
	[]call{{name: "fcntl(F_OFD_SETLK)", number: unix.SYS_FCNTL, when: &condition{1, unix.F_OFD_SETLK, false}}},

	writing("write", unix.SYS_WRITE, 0),
	writing("pwrite64", unix.SYS_PWRITE64, 0),
	writing("writev", unix.SYS_WRITEV, 0),
	writing("pwritev", unix.SYS_PWRITEV, 0),
	writing("pwritev2", unix.SYS_PWRITEV2, 0),
	writing("sendfile", unix.SYS_SENDFILE, 0),
	writing("splice", unix.SYS_SPLICE, 2),
	writing("copy_file_range", unix.SYS_COPY_FILE_RANGE, 2),

	// tgkill is missing: the Go runtime signals its own threads all the time.
	// Signal 0 only asks whether there is such a process.
	[]call{
		{name: "kill", number: unix.SYS_KILL, file: -1, when: &condition{1, anySignal, true}},
		{name: "pidfd_send_signal", number: unix.SYS_PIDFD_SEND_SIGNAL, file: -1, when: &condition{1, anySignal, true}},
	},
)

func onPath(name string, number uintptr, paths ...int) []call {
	return []call{{name: name, number: number, paths: paths, file: -1}}
}

func onFile(name string, number uintptr) []call {
	return []call{{name: name, number: number}}
}

func writing(name string, number uintptr, file int) []call {
	return []call{{name: name, number: number, file: file, regular: true}}
}
