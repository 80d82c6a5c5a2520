// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import "golang.org/x/sys/unix"

// Where things are in struct seccomp_data. The lower half of an argument comes
// first on the architectures that there are.
const (
	numberOffset       = 0
	architectureOffset = 4
	argumentsOffset    = 16
	argumentSize       = 8
)

// filter makes the kernel ask about the calls, and allow all others.
func filter(calls []call) []unix.SockFilter {
	program := []unix.SockFilter{
		load(architectureOffset),
		jump(unix.BPF_JEQ, auditArchitecture, 1, 0),
		result(unix.SECCOMP_RET_ALLOW),
		load(numberOffset),
	}
	for _, c := range calls {
		if c.when == nil {
			program = append(program,
				jump(unix.BPF_JEQ, uint32(c.number), 0, 1),
				result(unix.SECCOMP_RET_USER_NOTIF),
			)
			continue
		}
		test := uint16(unix.BPF_JEQ)
		if c.when.mask {
			test = unix.BPF_JSET
		}
		program = append(program,
			jump(unix.BPF_JEQ, uint32(c.number), 0, 4),
			load(argumentsOffset+argumentSize*uint32(c.when.argument)),
			jump(test, c.when.value, 0, 1),
			result(unix.SECCOMP_RET_USER_NOTIF),
			result(unix.SECCOMP_RET_ALLOW),
		)
	}
	return append(program, result(unix.SECCOMP_RET_ALLOW))
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// jump skips as many instructions as yes or no says.
func jump(test uint16, value uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | test | unix.BPF_K, K: value, Jt: yes, Jf: no}
}

func result(action uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
}
