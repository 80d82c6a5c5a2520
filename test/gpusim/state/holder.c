// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Processes that may not write the state, as in containers, and hold something of a
// GPU all the same (gs_hold in state.h). What they hold is where they have a lock, far
// behind the end of the file: read locks need no right to write, everybody who can
// open the file sees them, and the kernel knows whose they are and drops them.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // F_OFD_GETLK
#endif

#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// What a lock's place says, from the highest bits to the lowest. Owners (owner.c) are
// below FIRST. The key distinguishes processes that hold the same.
#define FIRST (UINT64_C(1) << 62)
#define LAST INT64_MAX
enum { GPU_BITS = 4, INSTANCE_BITS = 5, COMPUTE_BITS = 4, KIND_BITS = 1, KEY_BITS = 17, SM_BITS = 7, MEMORY_BITS = 24 };
// What changes while a process holds the same thing.
enum { CHANGING_BITS = SM_BITS + MEMORY_BITS };

static uint64_t put(uint64_t place, int bits, uint64_t value)
{
	return place << bits | (value & ((UINT64_C(1) << bits) - 1));
}

static uint64_t take(uint64_t *place, int bits)
{
	uint64_t value = *place & ((UINT64_C(1) << bits) - 1);
	*place >>= bits;
	return value;
}

static uint64_t place_of(const struct gs_process *p, uint64_t key)
{
	uint64_t place = put(0, GPU_BITS, (uint64_t)p->gpu);
	place = put(place, INSTANCE_BITS, (uint64_t)(p->instance_id + 1));
	place = put(place, COMPUTE_BITS, (uint64_t)(p->compute_id + 1));
	place = put(place, KIND_BITS, p->kind == GS_HANDLE);
	place = put(place, KEY_BITS, key);
	place = put(place, SM_BITS, (uint64_t)p->sm);
	return FIRST | put(place, MEMORY_BITS, p->memory_bytes >> 20);
}

static void process_at(uint64_t place, struct gs_process *p)
{
	memset(p, 0, sizeof(*p));
	p->owner = place;
	p->memory_bytes = take(&place, MEMORY_BITS) << 20;
	p->sm = (int32_t)take(&place, SM_BITS);
	take(&place, KEY_BITS);
	p->kind = take(&place, KIND_BITS) ? GS_HANDLE : GS_COMPUTE;
	p->compute_id = (int32_t)take(&place, COMPUTE_BITS) - 1;
	p->instance_id = (int32_t)take(&place, INSTANCE_BITS) - 1;
	p->gpu = (int32_t)take(&place, GPU_BITS);
}

static int set(const struct gs_handle *h, short type, uint64_t place)
{
	// Not an OFD lock: of those the kernel does not say whose they are.
	struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1};
	return fcntl(h->fd, F_SETLK, &l) == 0 ? 0 : errno;
}

int gs_hold(struct gs_handle *h, const struct gs_process *p, uint64_t *held)
{
	uint64_t key;
	if (*held != 0)
		key = *held >> CHANGING_BITS;
	else if (syscall(SYS_getrandom, &key, sizeof(key), 0) != (long)sizeof(key))
		return errno;
	uint64_t place = place_of(p, key);
	if (place == *held)
		return 0;
	// The new one first, so that nobody sees the device free in between.
	int err = set(h, F_RDLCK, place);
	if (err == 0 && *held != 0)
		err = set(h, F_UNLCK, *held);
	*held = place;
	return err;
}

// name_process fills in what the kernel calls a process.
static void name_process(struct gs_process *p)
{
	char path[64];
	snprintf(path, sizeof(path), "/proc/%d/comm", (int)p->pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t n = read(fd, p->name, sizeof(p->name) - 1);
	close(fd);
	if (n > 0 && p->name[n - 1] == '\n')
		p->name[n - 1] = '\0';
}

// same reports whether two entries are one process that is about to say how much memory
// it has now.
static int same(const struct gs_process *a, const struct gs_process *b)
{
	return a->owner >= FIRST && a->owner >> CHANGING_BITS == b->owner >> CHANGING_BITS;
}

static void add(struct gs_machine *m, const struct gs_process *p)
{
	for (int i = 0; i < m->process_count; i++)
		if (same(&m->processes[i], p)) {
			if (p->memory_bytes > m->processes[i].memory_bytes)
				m->processes[i] = *p;
			return;
		}
	if (p->gpu < m->gpu_count && m->process_count < GS_MAX_PROCESSES)
		m->processes[m->process_count++] = *p;
}

// find adds who has a lock from one place to another.
static void find(const struct gs_handle *h, struct gs_machine *m, uint64_t from, uint64_t to)
{
	while (from <= to) {
		struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)from,
				  .l_len = (off_t)(to - from + 1)};
		// An open file's own question, so that this process's locks count as well.
		if (fcntl(h->fd, F_OFD_GETLK, &l) != 0 || l.l_type == F_UNLCK)
			return;
		uint64_t first = (uint64_t)l.l_start, last = first + (uint64_t)l.l_len - 1;
		if (first < from || last > to || l.l_len <= 0)
			return;
		struct gs_process p;
		process_at(last, &p);
		p.pid = (int32_t)l.l_pid; // 0 if it is not in this PID namespace
		if (p.pid > 0)
			name_process(&p);
		add(m, &p);
		// The kernel gives any one, not the first.
		find(h, m, from, first - 1);
		from = last + 1;
	}
}

void gs_add_holders(const struct gs_handle *h, struct gs_machine *m)
{
	int32_t count = gs_bounded(m->process_count, GS_MAX_PROCESSES), kept = 0;
	for (int32_t i = 0; i < count; i++) {
		if (m->processes[i].owner >= FIRST)
			continue;
		if (kept != i)
			m->processes[kept] = m->processes[i];
		kept++;
	}
	m->process_count = kept;
	find(h, m, FIRST, LAST);
}
