// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"slices"

	"golang.org/x/sys/unix"
)

const auditArchitecture = unix.AUDIT_ARCH_X86_64

// legacy are the calls that newer architectures have no more.
var legacy = slices.Concat(
	onPath("mkdir", unix.SYS_MKDIR, 0),
	onPath("mknod", unix.SYS_MKNOD, 0),
	onPath("rmdir", unix.SYS_RMDIR, 0),
	onPath("unlink", unix.SYS_UNLINK, 0),
	onPath("rename", unix.SYS_RENAME, 0, 1),
	onPath("link", unix.SYS_LINK, 0, 1),
	onPath("symlink", unix.SYS_SYMLINK, 0, 1),
	onPath("creat", unix.SYS_CREAT, 0),
	onPath("chmod", unix.SYS_CHMOD, 0),
	onPath("chown", unix.SYS_CHOWN, 0),
	onPath("lchown", unix.SYS_LCHOWN, 0),
	[]call{{name: "open", number: unix.SYS_OPEN, paths: []int{0}, file: -1, when: &condition{1, making, true}}},
)
