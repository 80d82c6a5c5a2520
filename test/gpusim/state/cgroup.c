// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Limits of cgroups (state.h). All that is known of cgroups here is that the kernel counts a
// process for the one whose cgroup.procs lists it.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "state.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

uint64_t gs_cgroup(const char *path)
{
	struct statfs fs;
	struct statx s; // the system call, as in find.c
	if (statfs(path, &fs) != 0 || fs.f_type != CGROUP2_SUPER_MAGIC ||
	    syscall(SYS_statx, AT_FDCWD, path, 0, STATX_TYPE | STATX_INO, &s) != 0 || (s.stx_mode & S_IFMT) != S_IFDIR)
		return 0;
	return s.stx_ino;
}

struct gs_memory_limit *gs_memory_limit_of(struct gs_machine *m, int gpu, uint64_t cgroup)
{
	for (int i = 0; i < GS_MAX_MEMORY_LIMITS; i++)
		if (m->memory_limits[i].gpu == gpu && m->memory_limits[i].inode == cgroup)
			return &m->memory_limits[i];
	return NULL;
}

static int is_over(const struct gs_memory_limit *l)
{
	return l->inode == 0 || gs_cgroup(l->cgroup) != l->inode;
}

struct gs_memory_limit *gs_new_memory_limit(struct gs_machine *m, int gpu, const char *cgroup)
{
	for (int i = 0; i < GS_MAX_MEMORY_LIMITS && strlen(cgroup) < GS_CGROUP; i++) {
		struct gs_memory_limit *l = &m->memory_limits[i];
		if (!is_over(l))
			continue;
		*l = (struct gs_memory_limit){.inode = gs_cgroup(cgroup), .hard = UINT64_MAX, .gpu = gpu};
		strcpy(l->cgroup, cgroup);
		return l;
	}
	return NULL;
}

// has reports whether the limit's cgroup has the process.
static int has(const struct gs_memory_limit *l, int pid)
{
	char path[GS_CGROUP + 16];
	int listed = 0, found = 0;
	snprintf(path, sizeof(path), "%s/cgroup.procs", l->cgroup);
	FILE *f = fopen(path, "re");
	while (f != NULL && !found && fscanf(f, "%d", &listed) == 1)
		found = listed == pid;
	if (f != NULL)
		fclose(f);
	return found;
}

uint64_t gs_used_within(const struct gs_machine *m, const struct gs_memory_limit *l)
{
	uint64_t sum = 0;
	for (int i = 0; i < gs_bounded(m->process_count, GS_MAX_PROCESSES); i++)
		if (m->processes[i].gpu == l->gpu && m->processes[i].pid > 0 && has(l, m->processes[i].pid))
			sum += m->processes[i].memory_bytes;
	return sum;
}

uint64_t gs_memory_left(const struct gs_machine *m, int gpu, int pid)
{
	uint64_t left = UINT64_MAX;
	for (int i = 0; i < GS_MAX_MEMORY_LIMITS; i++) {
		const struct gs_memory_limit *l = &m->memory_limits[i];
		if (l->gpu != gpu || is_over(l) || !has(l, pid))
			continue;
		uint64_t used = gs_used_within(m, l), of = l->hard > used ? l->hard - used : 0;
		left = of < left ? of : left;
	}
	return left;
}
