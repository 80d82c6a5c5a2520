// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What all processes count in the file: calls, strikes of faults, and time. It
// lies beside the two machines, so neither lock nor commit is needed.

#include "state.h"

#include <errno.h>
#include <string.h>

static int named(const struct gs_counter *c, const char *name)
{
	return atomic_load_explicit(&c->state, memory_order_acquire) == GS_COUNTER_NAMED && strcmp(c->name, name) == 0;
}

// take makes a free counter that of name. A process that dies in between leaves an
// unused counter.
static int take(struct gs_counter *c, const char *name)
{
	uint32_t expected = GS_COUNTER_FREE;
	if (!atomic_compare_exchange_strong(&c->state, &expected, GS_COUNTER_TAKEN))
		return 0;
	memcpy(c->name, name, strlen(name) + 1);
	atomic_store_explicit(&c->state, GS_COUNTER_NAMED, memory_order_release);
	return 1;
}

// counter_of finds or makes the counter of a name. NULL if it may not.
static struct gs_counter *counter_of(struct gs_handle *h, const char *name)
{
	if (h->file == NULL || !h->writable || strlen(name) >= GS_LONG_NAME)
		return NULL;
	uint32_t hash = 2166136261u; // FNV-1a
	for (const char *c = name; *c != '\0'; c++)
		hash = (hash ^ (unsigned char)*c) * 16777619u;
	for (uint32_t i = 0; i < GS_MAX_COUNTERS; i++) {
		struct gs_counter *c = &h->file->counters[(hash + i) % GS_MAX_COUNTERS];
		if (named(c, name) || take(c, name))
			return c;
	}
	return NULL;
}

void gs_count(struct gs_handle *h, const char *function)
{
	struct gs_counter *c = counter_of(h, function);
	if (c != NULL)
		atomic_fetch_add_explicit(&c->calls, 1, memory_order_relaxed);
}

void gs_mark_unmodelled(struct gs_handle *h, const char *function)
{
	struct gs_counter *c = counter_of(h, function);
	if (c != NULL)
		atomic_store(&c->unmodelled, 1);
}

int gs_counter_at(const struct gs_handle *h, int i, const char **name, uint64_t *calls, int *unmodelled)
{
	if (i < 0 || i >= GS_MAX_COUNTERS)
		return ENOENT;
	struct gs_counter *c = &h->file->counters[i];
	if (atomic_load_explicit(&c->state, memory_order_acquire) != GS_COUNTER_NAMED)
		return EAGAIN;
	*name = c->name;
	*calls = atomic_load(&c->calls);
	*unmodelled = atomic_load(&c->unmodelled) != 0;
	return 0;
}

static struct gs_fault_count *count_of(const struct gs_handle *h, uint64_t serial)
{
	return &h->file->fault_counts[serial % GS_FAULT_COUNTS];
}

uint64_t gs_fault_seen(struct gs_handle *h, uint64_t serial)
{
	_Atomic uint64_t *seen = &count_of(h, serial)->seen;
	return h->writable ? atomic_fetch_add(seen, 1) : atomic_load(seen);
}

void gs_fault_struck(struct gs_handle *h, uint64_t serial)
{
	if (h->writable)
		atomic_fetch_add(&count_of(h, serial)->struck, 1);
}

void gs_fault_counts(const struct gs_handle *h, uint64_t serial, uint64_t *seen, uint64_t *struck)
{
	*seen = atomic_load(&count_of(h, serial)->seen);
	*struck = atomic_load(&count_of(h, serial)->struck);
}

void gs_fault_start(struct gs_handle *h, uint64_t serial)
{
	atomic_store(&count_of(h, serial)->seen, 0);
	atomic_store(&count_of(h, serial)->struck, 0);
}

int gs_still(const struct gs_handle *h, uint64_t generation)
{
	atomic_thread_fence(memory_order_acquire);
	return atomic_load_explicit(&h->file->generation, memory_order_relaxed) == generation;
}

int gs_fault_there(const struct gs_handle *h, uint64_t serial, int hanging)
{
	for (;;) {
		uint64_t generation = gs_generation(h);
		const struct gs_machine *m = &h->file->slot[generation % 2];
		int is = 0;
		for (int i = 0; i < gs_bounded(m->fault_count, GS_MAX_FAULTS); i++)
			is |= m->faults[i].serial == serial && (!hanging || m->faults[i].hang);
		if (gs_still(h, generation))
			return is;
	}
}

int gs_instances(const struct gs_handle *h, int gpu)
{
	if (gpu < 0 || gpu >= GS_MAX_GPUS)
		return 0;
	for (;;) {
		uint64_t generation = gs_generation(h);
		const struct gs_machine *m = &h->file->slot[generation % 2];
		int count = gpu < m->gpu_count ? gs_bounded(m->gpus[gpu].instance_count, GS_MAX_INSTANCES) : 0;
		if (gs_still(h, generation))
			return count;
	}
}

void gs_add_busy(struct gs_handle *h, int gpu, uint64_t duration)
{
	if (h->writable)
		atomic_fetch_add(&h->file->busy[gpu], duration);
}

uint64_t gs_busy(const struct gs_handle *h, int gpu)
{
	return atomic_load(&h->file->busy[gpu]);
}
