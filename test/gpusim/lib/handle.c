// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Handles. A handle points to an entry below, which says what it stands for;
// the entry is never freed nor changed, so that an old handle is recognised
// and not followed. An instance has one entry of each kind, found through its
// place in the table of current ones.

#include "lib.h"

#include <stdlib.h>

enum kind { KIND_GPU = 1, KIND_MIG, KIND_INSTANCE, KIND_COMPUTE, KIND_COUNT };

struct entry {
	enum kind kind;
	int gpu;
	uint64_t instance; // serials; of a GPU, how often it was reset
	uint64_t compute;
};

enum { PER_CHUNK = 1024 };

struct chunk {
	struct chunk *next;
	int used;
	struct entry entries[PER_CHUNK];
};

static struct chunk *chunks;
static struct entry *current[KIND_COUNT][GS_MAX_GPUS][GS_MAX_INSTANCES][GS_MAX_COMPUTE];

static struct entry *add_entry(void)
{
	if (chunks == NULL || chunks->used == PER_CHUNK) {
		struct chunk *c = calloc(1, sizeof(*c));
		if (c == NULL)
			return NULL;
		c->next = chunks;
		chunks = c;
	}
	return &chunks->entries[chunks->used++];
}

static struct entry *entry_for(enum kind kind, int gpu, const struct gs_instance *in, const struct gs_compute *ci)
{
	int gi = in == NULL ? 0 : in->id % GS_MAX_INSTANCES;
	struct entry **place = &current[kind][gpu][gi][ci == NULL ? 0 : ci->id % GS_MAX_COMPUTE];
	struct entry wanted = {
		.kind = kind,
		.gpu = gpu,
		.instance = in == NULL ? (uint64_t)view.gpus[gpu].resets : in->serial,
		.compute = ci == NULL ? 0 : ci->serial,
	};
	if (*place == NULL || (*place)->instance != wanted.instance || (*place)->compute != wanted.compute) {
		struct entry *e = add_entry();
		if (e == NULL)
			return NULL;
		*e = wanted;
		*place = e;
	}
	return *place;
}

// entry_of checks that a pointer from outside is one of ours.
static const struct entry *entry_of(const void *handle)
{
	uintptr_t p = (uintptr_t)handle;
	for (const struct chunk *c = chunks; c != NULL; c = c->next) {
		uintptr_t first = (uintptr_t)c->entries;
		if (p >= first && p < (uintptr_t)&c->entries[c->used] && (p - first) % sizeof(struct entry) == 0)
			return handle;
	}
	return NULL;
}

// What was destroyed still has its GPU.
int gpu_of_handle(const void *handle)
{
	const struct entry *e = entry_of(handle);
	return e == NULL ? -1 : e->gpu;
}

nvmlDevice_t gpu_handle(int gpu)
{
	return (nvmlDevice_t){(void *)entry_for(KIND_GPU, gpu, NULL, NULL)};
}

nvmlDevice_t mig_handle(int gpu, const struct gs_instance *in, const struct gs_compute *ci)
{
	return (nvmlDevice_t){(void *)entry_for(KIND_MIG, gpu, in, ci)};
}

nvmlGpuInstance_t instance_handle(int gpu, const struct gs_instance *in)
{
	return (nvmlGpuInstance_t){(void *)entry_for(KIND_INSTANCE, gpu, in, NULL)};
}

nvmlComputeInstance_t compute_handle(int gpu, const struct gs_instance *in, const struct gs_compute *ci)
{
	return (nvmlComputeInstance_t){(void *)entry_for(KIND_COMPUTE, gpu, in, ci)};
}

// find_instance fills in what the entry's serials stand for in this machine.
static int find_instance(struct target *t, const struct entry *e)
{
	for (int i = 0; i < t->gpu->instance_count; i++) {
		struct gs_instance *in = &t->gpu->instances[i];
		if (in->serial != e->instance)
			continue;
		t->in = in;
		t->profile = profile_by_id(t->gpu, in->profile_id);
		if (e->compute == 0)
			return t->profile != NULL;
		for (int j = 0; j < in->compute_count; j++)
			if (in->compute[j].serial == e->compute) {
				t->ci = &in->compute[j];
				return t->profile != NULL;
			}
	}
	return 0;
}

static nvmlReturn_t resolve(struct gs_machine *m, const void *handle, unsigned int kinds, struct target *t)
{
	const struct entry *e = entry_of(handle);
	memset(t, 0, sizeof(*t));
	if (e == NULL || (kinds >> e->kind & 1u) == 0 || e->gpu >= m->gpu_count || !gpu_visible(e->gpu))
		return NVML_ERROR_INVALID_ARGUMENT;
	t->index = e->gpu;
	t->gpu = &m->gpus[e->gpu];
	if (e->kind == KIND_GPU ? e->instance != (uint64_t)t->gpu->resets : !find_instance(t, e))
		return NVML_ERROR_INVALID_ARGUMENT;
	return NVML_SUCCESS;
}

nvmlReturn_t target_device(struct gs_machine *m, nvmlDevice_t d, struct target *t)
{
	return resolve(m, d.handle, 1u << KIND_GPU | 1u << KIND_MIG, t);
}

nvmlReturn_t target_gpu(struct gs_machine *m, nvmlDevice_t d, struct target *t)
{
	return resolve(m, d.handle, 1u << KIND_GPU, t);
}

nvmlReturn_t target_mig(struct gs_machine *m, nvmlDevice_t d, struct target *t)
{
	return resolve(m, d.handle, 1u << KIND_MIG, t);
}

nvmlReturn_t target_instance(struct gs_machine *m, nvmlGpuInstance_t g, struct target *t)
{
	return resolve(m, g.handle, 1u << KIND_INSTANCE, t);
}

nvmlReturn_t target_compute(struct gs_machine *m, nvmlComputeInstance_t c, struct target *t)
{
	return resolve(m, c.handle, 1u << KIND_COMPUTE, t);
}
