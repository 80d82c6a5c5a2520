// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Owners of processes' entries, and what an owner asks about (state.h).

#ifndef _GNU_SOURCE
#define _GNU_SOURCE // F_OFD_SETLK
#endif

#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// Owners are numbers of bytes that nothing else has to do with.
#define FIRST_OWNER (UINT64_C(1) << 40)
#define LAST_OWNER (UINT64_C(1) << 62)

static struct flock lock_of(uint64_t owner)
{
	return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)owner, .l_len = 1};
}

int gs_own(struct gs_handle *h)
{
	uint64_t random;
	if (!h->writable)
		return EROFS;
	// The system call, because the library may meet an older C library.
	if (syscall(SYS_getrandom, &random, sizeof(random), 0) != (long)sizeof(random))
		return errno;
	random = FIRST_OWNER + random % (LAST_OWNER - FIRST_OWNER);
	struct flock l = lock_of(random);
	if (fcntl(h->fd, F_OFD_SETLK, &l) != 0)
		return errno;
	h->owner = random;
	return 0;
}

// When it cannot be told, the owner lives: nothing is lost then.
int gs_owner_lives(const struct gs_handle *h, uint64_t owner)
{
	if (owner == 0 || owner == h->owner)
		return 1;
	struct flock l = lock_of(owner);
	return fcntl(h->fd, F_OFD_GETLK, &l) != 0 || l.l_type != F_UNLCK;
}

void gs_drop_dead(const struct gs_handle *h, struct gs_machine *m)
{
	int32_t count = gs_bounded(m->process_count, GS_MAX_PROCESSES), kept = 0;
	uint64_t last = 0; // one owner has many entries in a row
	int last_lives = 1;
	for (int32_t i = 0; i < count; i++) {
		if (m->processes[i].owner != last) {
			last = m->processes[i].owner;
			last_lives = gs_owner_lives(h, last);
		}
		if (!last_lives)
			continue;
		if (kept != i)
			m->processes[kept] = m->processes[i];
		kept++;
	}
	m->process_count = kept;
}

// The byte that all lock who have the driver open, behind those of state.c.
#define DRIVER_BYTE 64

static int64_t initialization(const struct gs_machine *m)
{
	int loaded = 1;
	for (int i = 0; i < gs_bounded(m->gpu_count, GS_MAX_GPUS); i++)
		loaded &= m->gpus[i].persistence != 0;
	for (int i = 0; !loaded && i < gs_bounded(m->latency_count, GS_MAX_LATENCIES); i++)
		if (strcmp(m->latencies[i].function, GS_DRIVER_OPEN) == 0)
			return m->latencies[i].base;
	return 0;
}

int64_t gs_open_driver(struct gs_handle *h)
{
	struct flock l = lock_of(DRIVER_BYTE);
	int alone = fcntl(h->fd, F_OFD_GETLK, &l) == 0 && l.l_type == F_UNLCK;
	// A read lock needs no right to write, and many can have it.
	l = lock_of(DRIVER_BYTE);
	l.l_type = F_RDLCK;
	(void)fcntl(h->fd, F_OFD_SETLK, &l);
	int64_t duration = 0;
	uint64_t generation;
	do {
		generation = gs_generation(h);
		duration = alone ? initialization(&h->file->slot[generation % 2]) : 0;
	} while (!gs_still(h, generation));
	return duration;
}

void gs_boot_id(const struct gs_handle *h, char out[GS_NAME])
{
	uint64_t generation;
	do {
		generation = gs_generation(h);
		memcpy(out, h->file->slot[generation % 2].boot_id, GS_NAME);
	} while (!gs_still(h, generation));
	out[GS_NAME - 1] = '\0';
}

uint32_t gs_wanted_faults(const struct gs_handle *h, uint64_t owner)
{
	uint64_t generation;
	uint32_t gpus;
	do {
		generation = gs_generation(h);
		const struct gs_machine *m = &h->file->slot[generation % 2];
		gpus = 0;
		for (int i = 0; i < gs_bounded(m->process_count, GS_MAX_PROCESSES); i++)
			if (m->processes[i].owner == owner && m->processes[i].fault)
				gpus |= 1u << (m->processes[i].gpu % GS_MAX_GPUS);
	} while (!gs_still(h, generation));
	return gpus;
}
