// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// How a process finds the state file (see gs_find in state.h), and what other
// files are.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <linux/stat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STATE_IN_ROOT "/" GS_HOME "/state"
#define STATE_LINK "libnvidia-gpusim-state.so.*"

#define FILE_TYPE_MASK 0170000
#define CHAR_DEVICE 0020000

// The library is mounted into containers that may have an older C library.
// stat() is a symbol of glibc 2.33; the system call has no version.
static int look(int fd, const char *path, int flags, struct statx *s)
{
	return syscall(SYS_statx, fd, path, flags, STATX_TYPE | STATX_INO, s) == 0;
}

int gs_is_char_device(const char *path)
{
	struct statx s;
	return look(AT_FDCWD, path, 0, &s) && (s.stx_mode & FILE_TYPE_MASK) == CHAR_DEVICE;
}

int gs_is_link(const char *root, const char *name)
{
	char path[GS_PATH + 64], target[1];
	int n = snprintf(path, sizeof(path), "%s/%s", root, name);
	return n > 0 && (size_t)n < sizeof(path) && readlink(path, target, sizeof(target)) > 0;
}

int gs_make_node(const char *path, unsigned int major, unsigned int minor)
{
	if (gs_is_char_device(path))
		return 0;
	// mknod() is a symbol of glibc 2.33, too.
	unsigned long device = (unsigned long)major << 8 | (minor & 0xff);
	if (syscall(SYS_mknodat, AT_FDCWD, path, CHAR_DEVICE | 0666, device) != 0)
		return errno;
	return chmod(path, 0666) == 0 ? 0 : errno; // past the umask
}

int gs_in_place(const struct gs_handle *h, const char *path)
{
	struct statx open, there;
	return look(h->fd, "", AT_EMPTY_PATH, &open) && look(AT_FDCWD, path, 0, &there) &&
	       open.stx_ino == there.stx_ino && open.stx_dev_major == there.stx_dev_major &&
	       open.stx_dev_minor == there.stx_dev_minor;
}

static int copy(char *out, const char *text, size_t length)
{
	if (length >= GS_PATH)
		return ENAMETOOLONG;
	memcpy(out, text, length);
	out[length] = '\0';
	return 0;
}

// root_of is the folder that holds usr/lib… (or lib…) of a library, or usr/bin
// of an executable. "" is "/".
static int root_of(const char *self, char *out)
{
	static const char *const parts[] = {"/usr/", "/lib/", "/lib64/", "/bin/", "/sbin/"};
	for (size_t p = 0; p < sizeof(parts) / sizeof(parts[0]); p++) {
		const char *last = NULL;
		for (const char *at = self; (at = strstr(at, parts[p])) != NULL; at++)
			last = at;
		if (last != NULL)
			return copy(out, self, (size_t)(last - self));
	}
	return copy(out, "", 0);
}

int gs_root_of_state(const char *path, char *root)
{
	size_t length = strlen(path), suffix = strlen(STATE_IN_ROOT);
	if (length < suffix || strcmp(path + length - suffix, STATE_IN_ROOT) != 0)
		return ENOENT;
	return copy(root, path, length - suffix);
}

// linked finds the hard link beside the library. An executable looks in the
// folders where libraries are.
static int linked(const char *self, const char *root, char *out)
{
	static const char *const folders[] = {
		"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
		"/lib/x86_64-linux-gnu",     "/lib/aarch64-linux-gnu",     "/lib64",     "/lib",
	};
	size_t count = sizeof(folders) / sizeof(folders[0]);
	const char *slash = strrchr(self, '/');
	for (size_t i = 0; i <= count; i++) {
		char pattern[GS_PATH + sizeof(STATE_LINK)];
		int n;
		if (i == 0)
			n = snprintf(pattern, sizeof(pattern), "%.*s/" STATE_LINK,
				     slash == NULL ? 0 : (int)(slash - self), self);
		else
			n = snprintf(pattern, sizeof(pattern), "%s%s/" STATE_LINK, root, folders[i - 1]);
		glob_t found;
		if (n < 0 || (size_t)n >= sizeof(pattern) || glob(pattern, 0, NULL, &found) != 0)
			continue;
		int err = copy(out, found.gl_pathv[0], strlen(found.gl_pathv[0]));
		globfree(&found);
		return err;
	}
	return ENOENT;
}

int gs_find(const char *self, struct gs_paths *out)
{
	memset(out, 0, sizeof(*out));
	int err = root_of(self, out->root);
	if (err != 0)
		return err;

	const char *given = getenv("GPUSIM_STATE");
	if (given != NULL && given[0] != '\0') {
		char root[GS_PATH];
		if (gs_root_of_state(given, root) == 0)
			memcpy(out->root, root, sizeof(root));
		return copy(out->state, given, strlen(given));
	}

	char path[GS_PATH + sizeof(STATE_IN_ROOT)];
	snprintf(path, sizeof(path), "%s" STATE_IN_ROOT, out->root);
	if (access(path, F_OK) == 0)
		return copy(out->state, path, strlen(path));
	return linked(self, out->root, out->state);
}
