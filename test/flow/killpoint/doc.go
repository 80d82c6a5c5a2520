// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package killpoint kills a program at a chosen effect, with SIGKILL, without
// the program's help.
//
// An effect is a system call that another process, or the next run of the same
// program, can see the result of: files that are made, written, renamed or
// removed, mounts, signals. The kernel stops the program at each of them (seccomp
// with user notification), and a Supervisor counts, and lets it go on or kills
// it. So it is the kernel that enumerates the effects: one that is new in the
// code is covered without anyone remembering it.
//
// What is there before effect n+1 is what is there after effect n. Killing
// before each effect, and once after the last, therefore covers both sides of
// every effect.
//
// Memory that is shared with other processes is written without system calls.
// The simulated NVML library changes the GPUs in that way. It ends each change
// by giving back a lock (fcntl with F_OFD_SETLK), which counts as an effect: the
// program can be killed right after the change, and at whatever is its effect
// before it. What goes through io_uring is not seen.
//
// What the program's children do are not its effects, and they outlive its death
// as they would otherwise: the program is killed before and after it starts and
// ends them. They have the filter too, which costs each of their effects some
// microseconds, and need the Supervisor's process for as long as they live.
//
// It takes Linux 5.19 and no privileges.
package killpoint
