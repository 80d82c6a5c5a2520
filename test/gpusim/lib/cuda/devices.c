// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Which devices a program sees, and how it counts them (package cuda).

#include "cuda.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void look(struct program *p)
{
	gs_read(&p->state, &p->machine);
	gs_drop_dead(&p->state, &p->machine);
}

static int present(const struct program *p, const char *format, int number)
{
	char path[GS_PATH + 64], name[64];
	snprintf(name, sizeof(name), format, number);
	return gs_join(path, sizeof(path), p->paths.root, name) == 0 && gs_is_char_device(path);
}

// Compute capability 8.0 and older than 8 have 64 cores in a multiprocessor.
static int multiprocessors(const struct gs_gpu *g)
{
	int few = g->compute_major < 8 || (g->compute_major == 8 && g->compute_minor == 0);
	return g->cores / (few ? 64 : 128);
}

static void describe_gpu(struct device *d, const struct gs_gpu *g, int index)
{
	memset(d, 0, sizeof(*d));
	snprintf(d->uuid, sizeof(d->uuid), "%s", g->uuid);
	snprintf(d->name, sizeof(d->name), "%s", g->product_name);
	d->gpu = index;
	d->instance = d->compute = -1;
	d->minor = g->minor;
	d->mode = g->compute_mode;
	d->sms = multiprocessors(g);
	d->major = g->compute_major;
	d->memory = g->memory_bytes - g->reserved_bytes;
	d->context_memory = g->context_bytes;
	d->percentage = 100;
}

static const struct gs_profile *profile_of(const struct gs_gpu *g, const struct gs_instance *in)
{
	for (int i = 0; i < gs_bounded(g->profile_count, GS_MAX_PROFILES); i++)
		if (g->profiles[i].id == in->profile_id)
			return &g->profiles[i];
	return NULL;
}

static void describe_compute(struct device *d, const struct gs_gpu *g, int index, const struct gs_profile *profile,
			     const struct gs_instance *in, const struct gs_compute *ci)
{
	describe_gpu(d, g, index);
	snprintf(d->uuid, sizeof(d->uuid), "%s", ci->uuid);
	if (ci->placement.size < profile->slices)
		snprintf(d->name, sizeof(d->name), "%s MIG %dc.%s", g->product_name, ci->placement.size, profile->name);
	else
		snprintf(d->name, sizeof(d->name), "%s MIG %s", g->product_name, profile->name);
	d->instance = in->id;
	d->compute = ci->id;
	d->mode = ci->compute_mode;
	d->memory = (profile->memory_mib - (uint64_t)profile->reserved_mib) << 20;
	d->context_memory = g->mig_context_bytes;
	d->sms = profile->sms;
	for (int i = 0; i < gs_bounded(profile->ci_profile_count, GS_MAX_CI_PROFILES); i++)
		if (profile->ci_profiles[i].id == ci->profile_id)
			d->sms = profile->ci_profiles[i].sms;
}

static int instance_present(const struct program *p, const struct gs_gpu *g, const struct gs_instance *in,
			    const struct gs_compute *ci)
{
	int minor = 3 + 135 * g->minor + 9 * in->id;
	return present(p, "dev/nvidia-caps/nvidia-cap%d", 1) ||
	       (present(p, "dev/nvidia-caps/nvidia-cap%d", minor) &&
		present(p, "dev/nvidia-caps/nvidia-cap%d", minor + 1 + ci->id));
}

static int add_instances(const struct program *p, int index, struct device *out)
{
	const struct gs_gpu *g = &p->machine.gpus[index];
	int n = 0;
	for (int i = 0; i < gs_bounded(g->instance_count, GS_MAX_INSTANCES); i++) {
		const struct gs_instance *in = &g->instances[i];
		const struct gs_profile *profile = profile_of(g, in);
		for (int c = 0; profile != NULL && c < gs_bounded(in->compute_count, GS_MAX_COMPUTE); c++)
			if (instance_present(p, g, in, &in->compute[c]))
				describe_compute(&out[n++], g, index, profile, in, &in->compute[c]);
	}
	return n;
}

// here lists the devices whose nodes are below the root.
static int here(const struct program *p, struct device *out)
{
	int n = 0;
	if (!present(p, "dev/nvidiactl", 0))
		return 0;
	for (int i = 0; i < gs_bounded(p->machine.gpu_count, GS_MAX_GPUS); i++) {
		const struct gs_gpu *g = &p->machine.gpus[i];
		if (g->failure != 0 || !present(p, "dev/nvidia%d", g->minor))
			continue;
		if (g->mig_capable && g->mig_current)
			n += add_instances(p, i, out + n);
		else
			describe_gpu(&out[n++], g, i);
	}
	return n;
}

static int find_uuid(const struct device *list, int count, const char *uuid, size_t length)
{
	for (int i = 0; i < count; i++)
		if (strncmp(list[i].uuid, uuid, length) == 0)
			return i;
	return -1;
}

// ordinal is the nth GPU, or the first compute instance of it.
static int ordinal(const struct device *list, int count, long n)
{
	for (int i = 0; i < count; i++)
		if ((i == 0 || list[i].gpu != list[i - 1].gpu) && n-- == 0)
			return i;
	return -1;
}

// entry finds what one entry of CUDA_VISIBLE_DEVICES means.
static int entry(const struct device *list, int count, const char *text, size_t length)
{
	char word[GS_NAME] = "", *end;
	if (length == 0 || length >= sizeof(word))
		return -1;
	memcpy(word, text, length);
	long n = strtol(word, &end, 10);
	if (*end == '\0')
		return ordinal(list, count, n);
	return length < strlen("GPU-x") ? -1 : find_uuid(list, count, word, length);
}

// choose applies CUDA_VISIBLE_DEVICES: the first entry that means nothing ends it.
static int choose(const struct device *list, int count, const char *names, struct device *out)
{
	int n = 0;
	for (const char *at = names; n < MAX_DEVICES; at++) {
		size_t length = strcspn(at, ","), start = strspn(at, " \t"), end = length;
		while (end > start && isspace((unsigned char)at[end - 1]))
			end--;
		int i = start > length ? -1 : entry(list, count, at + start, end - start);
		if (i < 0 || find_uuid(out, n, list[i].uuid, sizeof(list[i].uuid)) >= 0)
			break;
		out[n++] = list[i];
		at += length;
		if (*at == '\0')
			break;
	}
	return n;
}

// of_server puts the devices into the server's order, and drops those that it has not.
static int of_server(struct device *list, int count, const char *const *served, int served_count)
{
	static struct device ordered[MAX_DEVICES];
	int n = 0;
	for (int s = 0; s < served_count && n < MAX_DEVICES; s++) {
		int i = find_uuid(list, count, served[s], sizeof(list[0].uuid));
		if (i >= 0)
			ordered[n++] = list[i];
	}
	memcpy(list, ordered, sizeof(list[0]) * (size_t)n);
	return n;
}

void find_devices(struct program *p, const char *const *served, int served_count)
{
	static struct device all[MAX_DEVICES];
	int count = here(p, all);
	if (served != NULL)
		count = of_server(all, count, served, served_count);
	const char *names = getenv("CUDA_VISIBLE_DEVICES");
	if (names != NULL) {
		p->count = choose(all, count, names, p->devices);
	} else {
		memcpy(p->devices, all, sizeof(all[0]) * (size_t)count);
		p->count = count;
	}
	// Where any compute instance is visible, the first one is the only device.
	for (int i = 0; i < p->count; i++)
		if (p->devices[i].compute >= 0) {
			p->devices[0] = p->devices[i];
			p->count = 1;
			return;
		}
}

uint64_t used(const struct gs_machine *m, const struct device *d)
{
	uint64_t sum = 0;
	for (int i = 0; i < gs_bounded(m->process_count, GS_MAX_PROCESSES); i++)
		if (m->processes[i].gpu == d->gpu && m->processes[i].instance_id == d->instance)
			sum += m->processes[i].memory_bytes;
	return sum;
}
