// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Look-ups in a machine, and texts.

#include "lib.h"

#include <inttypes.h>
#include <stdio.h>

const struct gs_profile *profile_by_id(const struct gs_gpu *gpu, uint32_t id)
{
	for (int i = 0; i < gpu->profile_count; i++)
		if (gpu->profiles[i].id == id)
			return &gpu->profiles[i];
	return NULL;
}

const struct gs_profile *profile_by_enum(const struct gs_gpu *gpu, uint32_t enumeration)
{
	for (int i = 0; i < gpu->profile_count; i++)
		if ((uint32_t)gpu->profiles[i].enumeration == enumeration)
			return &gpu->profiles[i];
	return NULL;
}

const struct gs_ci_profile *ci_profile_by_id(const struct gs_profile *p, uint32_t id)
{
	for (int i = 0; i < p->ci_profile_count; i++)
		if (p->ci_profiles[i].id == id)
			return &p->ci_profiles[i];
	return NULL;
}

struct gs_instance *instance_by_id(struct gs_gpu *gpu, uint32_t id)
{
	for (int i = 0; i < gpu->instance_count; i++)
		if ((uint32_t)gpu->instances[i].id == id)
			return &gpu->instances[i];
	return NULL;
}

struct gs_compute *compute_by_id(struct gs_instance *in, uint32_t id)
{
	for (int i = 0; i < in->compute_count; i++)
		if ((uint32_t)in->compute[i].id == id)
			return &in->compute[i];
	return NULL;
}

int held(const struct gs_machine *m, int gpu, int instance, int compute)
{
	for (int i = 0; i < m->process_count; i++) {
		const struct gs_process *p = &m->processes[i];
		if (p->gpu == gpu && (instance < 0 || p->instance_id == instance) &&
		    (compute < 0 || p->compute_id == compute))
			return 1;
	}
	return 0;
}

int computes(const struct gs_machine *m, int gpu)
{
	for (int i = 0; i < m->process_count; i++)
		if (m->processes[i].gpu == gpu && m->processes[i].kind != GS_HANDLE)
			return 1;
	return 0;
}

uint64_t memory_in_use(const struct gs_machine *m, int gpu, int instance)
{
	uint64_t sum = 0;
	for (int i = 0; i < m->process_count; i++) {
		const struct gs_process *p = &m->processes[i];
		if (p->gpu == gpu && (instance < 0 || p->instance_id == instance))
			sum += p->memory_bytes;
	}
	return sum;
}

int on_target(const struct gs_process *p, const struct target *t)
{
	return p->gpu == t->index && (t->in == NULL || p->instance_id == t->in->id) &&
	       (t->ci == NULL || p->compute_id == t->ci->id);
}

nvmlReturn_t copy_text(char *out, unsigned int length, const char *text)
{
	size_t need = strlen(text) + 1;
	if (out == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (length < need)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, text, need);
	return NVML_SUCCESS;
}

void profile_name(char *out, size_t size, const struct gs_profile *p, int compute_slices)
{
	if (compute_slices > 0 && compute_slices < p->slices)
		snprintf(out, size, "MIG %dc.%s", compute_slices, p->name);
	else
		snprintf(out, size, "MIG %s", p->name);
}

// hash is FNV-1a with the last step of splitmix64, so that texts that hardly differ do.
static uint64_t hash(const char *text, uint64_t seed)
{
	uint64_t h = UINT64_C(14695981039346656037) ^ seed;
	for (; *text != '\0'; text++)
		h = (h ^ (unsigned char)*text) * UINT64_C(1099511628211);
	h = (h ^ h >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	h = (h ^ h >> 27) * UINT64_C(0x94d049bb133111eb);
	return h ^ h >> 31;
}

void compute_uuid(char *out, size_t size, const struct gs_gpu *gpu, const struct gs_instance *in, struct gs_placement at)
{
	char text[GS_NAME + 64];
	snprintf(text, sizeof(text), "%s %d %d %d", gpu->uuid, in->id, in->placement.start, at.start);
	uint64_t high = hash(text, 0), low = hash(text, 1);
	high = (high & ~UINT64_C(0xf000)) | 0x5000; // the driver's are version 5
	low = (low & ~(UINT64_C(3) << 62)) | UINT64_C(1) << 63;
	snprintf(out, size, "MIG-%08" PRIx64 "-%04" PRIx64 "-%04" PRIx64 "-%04" PRIx64 "-%012" PRIx64, high >> 32,
		 high >> 16 & 0xffff, high & 0xffff, low >> 48, low & UINT64_C(0xffffffffffff));
}
