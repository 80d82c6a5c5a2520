// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Calls that a fault holds (state.h). Each has an entry beside the machines while it
// waits, which counts as long as the owner of its handle is there, so that a process
// that is killed leaves nothing behind.

#include "state.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { POLL = 2000000 }; // nanoseconds

// An entry that somebody empties. No owner has this number.
#define EMPTYING 1

static void empty(struct gs_held *e)
{
	atomic_store(&e->ticket, 0);
	atomic_store(&e->owner, 0);
}

// drop_dead empties the entry of a process that has died.
static void drop_dead(const struct gs_handle *h, struct gs_held *e)
{
	uint64_t owner = atomic_load(&e->owner);
	if (owner > EMPTYING && !gs_owner_lives(h, owner) && atomic_compare_exchange_strong(&e->owner, &owner, EMPTYING))
		empty(e);
}

// enter makes an entry for a call. NULL where it may not be written, or all are taken.
static struct gs_held *enter(struct gs_handle *h, const struct gs_fault *f, const char *function, uint32_t gpus)
{
	if (gs_own(h) != 0)
		return NULL;
	for (int i = 0; i < GS_MAX_HELD; i++) {
		struct gs_held *e = &h->file->held[i];
		uint64_t nobody = 0;
		drop_dead(h, e);
		if (!atomic_compare_exchange_strong(&e->owner, &nobody, h->owner))
			continue;
		e->fault = f->serial;
		e->gpus = gpus;
		e->pid = getpid();
		strncpy(e->function, function, sizeof(e->function) - 1);
		e->function[sizeof(e->function) - 1] = '\0';
		// Last, for it makes the entry visible.
		atomic_store(&e->ticket, 1 + atomic_fetch_add(&h->file->tickets, 1));
		return e;
	}
	return NULL;
}

void gs_wait_at_gate(const char *path, const struct gs_fault *f, const char *function, uint32_t gpus)
{
	const struct timespec pause = {.tv_nsec = POLL};
	struct gs_handle h;
	if (gs_open(path, &h) != 0)
		return;
	struct gs_held *e = enter(&h, f, function, gpus);
	while (gs_in_place(&h, path) && gs_fault_hangs(&h, f->serial)) {
		if (e != NULL && atomic_load(&e->may_go) == atomic_load(&e->ticket))
			break;
		clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
	}
	if (e != NULL)
		empty(e);
	gs_close(&h);
}

int gs_held_at(const struct gs_handle *h, int i, struct gs_held_call *out)
{
	if (i < 0 || i >= GS_MAX_HELD)
		return ENOENT;
	const struct gs_held *e = &h->file->held[i];
	uint64_t owner = atomic_load(&e->owner), ticket = atomic_load(&e->ticket);
	if (ticket == 0 || atomic_load(&e->may_go) == ticket || owner <= EMPTYING || !gs_owner_lives(h, owner))
		return EAGAIN;
	out->ticket = ticket;
	out->fault = e->fault;
	out->gpus = e->gpus;
	out->pid = e->pid;
	memcpy(out->function, e->function, sizeof(out->function));
	out->function[sizeof(out->function) - 1] = '\0';
	// Each ticket is given once, so what was copied is that call's.
	return atomic_load(&e->ticket) == ticket ? 0 : EAGAIN;
}

int gs_let_go(struct gs_handle *h, int i, uint64_t ticket)
{
	if (!h->writable)
		return EROFS;
	struct gs_held *e = &h->file->held[i];
	if (atomic_load(&e->ticket) != ticket)
		return ENOENT;
	atomic_store(&e->may_go, ticket);
	return 0;
}
