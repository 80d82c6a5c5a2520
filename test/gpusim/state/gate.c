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

enum { SECOND = 1000000000, POLL = 2000000 }; // nanoseconds

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

// enter makes an entry for a call that is held, or that is behind one. NULL where it may not be written, or all are
// taken.
static struct gs_held *enter(struct gs_handle *h, const struct gs_fault *f, const char *function, uint32_t gpus, int behind)
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
		e->behind = behind;
		strncpy(e->function, function, sizeof(e->function) - 1);
		e->function[sizeof(e->function) - 1] = '\0';
		// Last, for it makes the entry visible.
		atomic_store(&e->ticket, 1 + atomic_fetch_add(&h->file->tickets, 1));
		return e;
	}
	return NULL;
}

static void leave(struct gs_held *e)
{
	if (e != NULL)
		empty(e);
}

static void pause_for(int64_t nanoseconds)
{
	struct timespec end;
	clock_gettime(CLOCK_MONOTONIC, &end);
	nanoseconds += end.tv_nsec;
	end.tv_sec += nanoseconds / SECOND;
	end.tv_nsec = nanoseconds % SECOND;
	// Signals interrupt it, and Go sends many.
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL) != 0)
		;
}

// there reports whether the fault is there as it was when it struck.
static int there(const struct gs_handle *h, const char *path, uint64_t fault)
{
	return gs_in_place(h, path) && gs_fault_there(h, fault, 0);
}

static void wait_at_gate(struct gs_handle *h, const char *path, const struct gs_fault *f, const char *function,
			 uint32_t gpus)
{
	struct gs_held *e = enter(h, f, function, gpus, 0);
	while (gs_in_place(h, path) && gs_fault_there(h, f->serial, 1)) {
		if (e != NULL && atomic_load(&e->may_go) == atomic_load(&e->ticket))
			break;
		pause_for(POLL);
	}
	leave(e);
}

void gs_endure(const char *path, const struct gs_fault *f, const char *function, uint32_t gpus)
{
	struct gs_handle h;
	if (!f->hang && f->delay <= 0)
		return;
	if (gs_open(path, &h) != 0) {
		pause_for(f->delay);
		return;
	}
	int in_force = 1;
	if (f->all_gpus) {
		struct gs_held *e = enter(&h, f, function, gpus, 1);
		(void)gs_lock_all_gpus(&h, 1);
		leave(e);
		in_force = there(&h, path, f->serial);
	}
	if (in_force && f->delay > 0)
		pause_for(f->delay);
	if (in_force && f->hang)
		wait_at_gate(&h, path, f, function, gpus);
	gs_close(&h); // also lets go of all GPUs
}

const struct gs_fault *gs_fault_of_all_gpus(const struct gs_machine *m)
{
	for (int i = 0; i < gs_bounded(m->fault_count, GS_MAX_FAULTS); i++)
		if (m->faults[i].all_gpus)
			return &m->faults[i];
	return NULL;
}

void gs_wait_behind(const char *path, const struct gs_fault *f, const char *function, uint32_t gpus)
{
	struct gs_handle h;
	if (gs_open(path, &h) != 0)
		return;
	struct gs_held *e = enter(&h, f, function, gpus, 1);
	(void)gs_lock_all_gpus(&h, 0);
	leave(e);
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
	out->behind = e->behind;
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
