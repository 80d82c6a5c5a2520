// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// An instance needs its memory slices and its engines, and none of them is
// shared. Engines are a resource of their own: a placement can be free while
// the GPU has no JPEG engine left.

#include "mig_room.h"
#include "lib.h"

static void engines_of(const struct gs_profile *p, int out[ENGINE_KINDS])
{
	out[0] = p->copy_engines;
	out[1] = p->decoders;
	out[2] = p->encoders;
	out[3] = p->jpeg;
	out[4] = p->ofa;
}

// What a profile takes of the media engines, by the comments in nvml.h.
static int without_media(const struct gs_profile *p)
{
	return p->enumeration == NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME ||
	       p->enumeration == NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME;
}

static int with_all_media(const struct gs_profile *p)
{
	return p->enumeration == NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME ||
	       p->enumeration == NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME;
}

static int with_extended_media(const struct gs_profile *p)
{
	return p->enumeration == NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 ||
	       p->enumeration == NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 || with_all_media(p);
}

static uint64_t slices_of(struct gs_placement at)
{
	return ((1ull << (at.size & 63)) - 1) << (at.start & 63);
}

void room_of(const struct gs_gpu *gpu, struct room *room)
{
	memset(room, 0, sizeof(*room));
	room->gpu = gpu;
	for (int i = 0; i < gpu->profile_count; i++) {
		int engines[ENGINE_KINDS];
		engines_of(&gpu->profiles[i], engines);
		for (int e = 0; e < ENGINE_KINDS; e++)
			if (engines[e] > room->has[e])
				room->has[e] = engines[e]; // the largest profile has all
	}
	for (int i = 0; i < gpu->instance_count; i++) {
		const struct gs_profile *p = profile_by_id(gpu, gpu->instances[i].profile_id);
		if (p != NULL)
			room_take(room, p, gpu->instances[i].placement);
	}
}

int room_for(const struct room *room, const struct gs_profile *p, struct gs_placement at)
{
	if ((room->slices & slices_of(at)) != 0 || room->count[p - room->gpu->profiles] >= p->max_instances)
		return 0;
	int engines[ENGINE_KINDS];
	engines_of(p, engines);
	for (int e = 0; e < ENGINE_KINDS; e++)
		if (room->engines[e] + engines[e] > room->has[e])
			return 0;
	if (with_all_media(p) && room->media > 0)
		return 0;
	if (room->all_media > 0 && !without_media(p))
		return 0;
	return !(with_extended_media(p) && room->extended > 0);
}

void room_take(struct room *room, const struct gs_profile *p, struct gs_placement at)
{
	int engines[ENGINE_KINDS];
	engines_of(p, engines);
	for (int e = 0; e < ENGINE_KINDS; e++)
		room->engines[e] += engines[e];
	room->slices |= slices_of(at);
	room->count[p - room->gpu->profiles]++;
	room->media += !without_media(p);
	room->extended += with_extended_media(p);
	room->all_media += with_all_media(p);
}
