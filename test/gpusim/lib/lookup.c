// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Look-ups in a machine, and texts.

#include "lib.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

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

void make_uuid(char *out, size_t size)
{
	unsigned char b[16];
	if (syscall(SYS_getrandom, b, sizeof(b), 0) != (long)sizeof(b))
		memset(b, 0x5a, sizeof(b));
	b[6] = (unsigned char)((b[6] & 0x0f) | 0x50); // the driver's are version 5
	b[8] = (unsigned char)((b[8] & 0x3f) | 0x80);
	snprintf(out, size, "MIG-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		 b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}
