// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// A program without MPS: it enters itself into the machine, where it may write
// it. In a container it may not, and others do not learn of it.

#include "cuda.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// present_mode is the device's compute mode as of now.
static int present_mode(const struct gs_machine *m, const struct device *d)
{
	const struct gs_gpu *g = &m->gpus[d->gpu];
	for (int i = 0; d->instance >= 0 && i < gs_bounded(g->instance_count, GS_MAX_INSTANCES); i++)
		for (int c = 0; c < gs_bounded(g->instances[i].compute_count, GS_MAX_COMPUTE); c++)
			if (strcmp(g->instances[i].compute[c].uuid, d->uuid) == 0)
				return g->instances[i].compute[c].compute_mode;
	return d->instance >= 0 ? d->mode : g->compute_mode;
}

enum { PROHIBITED = 2, EXCLUSIVE_PROCESS = 3 }; // nvmlComputeMode_t

static int taken(const struct gs_machine *m, const struct device *d)
{
	for (int i = 0; i < gs_bounded(m->process_count, GS_MAX_PROCESSES); i++)
		if (m->processes[i].gpu == d->gpu && m->processes[i].instance_id == d->instance &&
		    m->processes[i].compute_id == d->compute)
			return 1;
	return 0;
}

static enum result may_use(const struct gs_machine *m, const struct device *d)
{
	int mode = present_mode(m, d);
	if (mode == PROHIBITED || (mode == EXCLUSIVE_PROCESS && taken(m, d)))
		return DEVICE_UNAVAILABLE;
	return SUCCESS;
}

// taken_by is what this program has of a device.
static uint64_t taken_by(const struct device *d)
{
	return d->used + (uint64_t)d->contexts * d->context_memory;
}

// sum is what all have, this program too.
static uint64_t sum(const struct program *p, const struct gs_machine *m, const struct device *d)
{
	return used(m, d) + (p->state.owner == 0 ? taken_by(d) : 0);
}

// enter replaces the entries of this process.
static void enter(const struct program *p, struct gs_machine *m)
{
	int32_t kept = 0;
	for (int i = 0; i < gs_bounded(m->process_count, GS_MAX_PROCESSES); i++)
		if (m->processes[i].owner != p->state.owner)
			m->processes[kept++] = m->processes[i];
	for (int i = 0; i < p->count && kept < GS_MAX_PROCESSES; i++) {
		const struct device *d = &p->devices[i];
		if (d->contexts == 0)
			continue;
		struct gs_process *out = &m->processes[kept++];
		memset(out, 0, sizeof(*out));
		snprintf(out->name, sizeof(out->name), "%s", program_invocation_short_name);
		out->owner = p->state.owner;
		out->memory_bytes = taken_by(d);
		out->pid = getpid();
		out->gpu = d->gpu;
		out->instance_id = d->instance;
		out->compute_id = d->compute;
		out->kind = GS_COMPUTE;
	}
	m->process_count = kept;
}

typedef enum result (*check_fn)(struct program *p, const struct gs_machine *m, struct device *d, uint64_t bytes);

// attempt runs check on the machine of now and, if that succeeds, writes the
// program's entries where that is possible.
static enum result attempt(struct program *p, int device, uint64_t bytes, check_fn check)
{
	struct device *d = &p->devices[device];
	if (p->state.writable && p->state.owner == 0)
		(void)gs_own(&p->state);
	if (p->state.owner == 0) {
		look(p);
		return check(p, &p->machine, d, bytes);
	}
	if (gs_begin(&p->state) != 0)
		return SYSTEM_NOT_READY;
	enum result r = check(p, p->state.next, d, bytes);
	if (r != SUCCESS) {
		gs_abort(&p->state);
		return r;
	}
	enter(p, p->state.next);
	return gs_commit(&p->state) == 0 ? SUCCESS : SYSTEM_NOT_READY;
}

static int fits(const struct program *p, const struct gs_machine *m, const struct device *d, uint64_t bytes)
{
	return bytes <= d->memory && sum(p, m, d) <= d->memory - bytes && bytes <= gs_memory_left(m, d->gpu, getpid());
}

static enum result make_context(struct program *p, const struct gs_machine *m, struct device *d, uint64_t bytes)
{
	(void)bytes;
	enum result r = d->contexts == 0 ? may_use(m, d) : SUCCESS;
	if (r == SUCCESS && !fits(p, m, d, d->context_memory))
		r = OUT_OF_MEMORY;
	if (r == SUCCESS)
		d->contexts++;
	return r;
}

static enum result take_memory(struct program *p, const struct gs_machine *m, struct device *d, uint64_t bytes)
{
	if (!fits(p, m, d, bytes))
		return OUT_OF_MEMORY;
	d->used += bytes;
	return SUCCESS;
}

enum result direct_context(struct program *p, int device)
{
	return attempt(p, device, 0, make_context);
}

enum result direct_alloc(struct program *p, int device, uint64_t bytes)
{
	return attempt(p, device, bytes, take_memory);
}

enum result direct_memory(struct program *p, int device, uint64_t *available, uint64_t *total)
{
	const struct device *d = &p->devices[device];
	look(p);
	uint64_t all = sum(p, &p->machine, d);
	*total = d->memory;
	*available = all < d->memory ? d->memory - all : 0;
	uint64_t left = gs_memory_left(&p->machine, d->gpu, getpid());
	if (left < *available)
		*available = left;
	return SUCCESS;
}
