// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Life of GPU instances.

#include "lib.h"
#include "mig_room.h"

// live_gpu checks a handle for calls about live instances.
static nvmlReturn_t live_gpu(struct gs_machine *m, nvmlDevice_t device, struct target *t)
{
	nvmlReturn_t r = target_gpu(m, device, t);
	if (r == NVML_SUCCESS && !t->gpu->mig_current)
		r = NVML_ERROR_NOT_SUPPORTED;
	return r;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int profileId,
						       unsigned int *count)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = live_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct gs_profile *p = profile_by_id(t.gpu, profileId);
	if (p == NULL)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	struct room room;
	room_of(t.gpu, &room);
	*count = 0;
	for (int i = 0; i < p->placement_count; i++)
		if (room_for(&room, p, p->placements[i])) {
			room_take(&room, p, p->placements[i]);
			++*count;
		}
	return NVML_SUCCESS;
}

struct creation {
	nvmlDevice_t device;
	unsigned int profile;
	const nvmlGpuInstancePlacement_t *placement; // NULL: the first that fits
	nvmlGpuInstance_t *out;
};

// free_id is the id that belongs to the placement (the two lists go together),
// or the first of the profile's ids that no instance has, or -1.
static int free_id(struct gs_gpu *gpu, const struct gs_profile *p, struct gs_placement at)
{
	for (int i = 0; i < p->placement_count && i < p->instance_id_count; i++)
		if (p->placements[i].start == at.start && instance_by_id(gpu, (uint32_t)p->instance_ids[i]) == NULL)
			return p->instance_ids[i];
	for (int i = 0; i < p->instance_id_count; i++)
		if (instance_by_id(gpu, (uint32_t)p->instance_ids[i]) == NULL)
			return p->instance_ids[i];
	return -1;
}

// place chooses where the instance goes.
static nvmlReturn_t place(const struct gs_gpu *gpu, const struct gs_profile *p, const nvmlGpuInstancePlacement_t *wish,
			  struct gs_placement *at)
{
	struct room room;
	room_of(gpu, &room);
	int known = 0;
	for (int i = 0; i < p->placement_count; i++) {
		*at = p->placements[i];
		if (wish != NULL && (wish->start != (unsigned int)at->start || wish->size != (unsigned int)at->size))
			continue;
		known = 1;
		if (room_for(&room, p, *at))
			return NVML_SUCCESS;
	}
	return wish != NULL && !known ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create(struct gs_machine *m, void *arg)
{
	const struct creation *c = arg;
	struct target t;
	struct gs_placement at;
	nvmlReturn_t r = live_gpu(m, c->device, &t);
	if (r != NVML_SUCCESS)
		return r;
	const struct gs_profile *p = profile_by_id(t.gpu, c->profile);
	if (p == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	r = place(t.gpu, p, c->placement, &at);
	if (r != NVML_SUCCESS)
		return r;
	// Whoever has a context on the undivided GPU is in the way of its division. Who only has it
	// open is not.
	if (t.gpu->instance_count == 0 && computes(m, t.index))
		return NVML_ERROR_IN_USE;
	int id = free_id(t.gpu, p, at);
	if (id < 0 || t.gpu->instance_count >= GS_MAX_INSTANCES)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	struct gs_instance *in = &t.gpu->instances[t.gpu->instance_count++];
	memset(in, 0, sizeof(*in));
	in->serial = m->next_serial++;
	in->id = id;
	in->profile_id = p->id;
	in->placement = at;
	*c->out = instance_handle(t.index, in);
	return c->out->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

static nvmlReturn_t create_instance(const struct creation *c)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = live_gpu(&view, c->device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (c->out == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_administrate() || !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	return change(create, (void *)c);
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profileId, nvmlGpuInstance_t *gpuInstance)
{
	struct creation c = {.device = device, .profile = profileId, .out = gpuInstance};
	return create_instance(&c);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profileId,
						      const nvmlGpuInstancePlacement_t *placement,
						      nvmlGpuInstance_t *gpuInstance)
{
	struct creation c = {.device = device, .profile = profileId, .placement = placement, .out = gpuInstance};
	if (placement == NULL) {
		ENTER();
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	return create_instance(&c);
}

static nvmlReturn_t destroy(struct gs_machine *m, void *arg)
{
	struct target t;
	nvmlReturn_t r = target_instance(m, *(nvmlGpuInstance_t *)arg, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (t.in->compute_count > 0 || held(m, t.index, t.in->id, -1))
		return NVML_ERROR_IN_USE;
	// The table stays dense, and zero behind its end.
	struct gs_instance *last = &t.gpu->instances[--t.gpu->instance_count];
	memmove(t.in, t.in + 1, (size_t)(last - t.in) * sizeof(*last));
	memset(last, 0, sizeof(*last));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t gpuInstance)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_instance(&view, gpuInstance, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (!may_administrate() || !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	return change(destroy, &gpuInstance);
}

// The array has to be as long as the profile says: count is only returned.
nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profileId, nvmlGpuInstance_t *gpuInstances,
				       unsigned int *count)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = live_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (gpuInstances == NULL || count == NULL || profile_by_id(t.gpu, profileId) == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	*count = 0;
	for (int i = 0; i < t.gpu->instance_count; i++) {
		if (t.gpu->instances[i].profile_id != profileId)
			continue;
		gpuInstances[*count] = instance_handle(t.index, &t.gpu->instances[i]);
		if (gpuInstances[(*count)++].handle == NULL)
			return NVML_ERROR_MEMORY;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *gpuInstance)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = live_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (gpuInstance == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	const struct gs_instance *in = instance_by_id(t.gpu, id);
	if (in == NULL)
		return NVML_ERROR_NOT_FOUND;
	*gpuInstance = instance_handle(t.index, in);
	return gpuInstance->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gpuInstance, nvmlGpuInstanceInfo_t *info)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_instance(&view, gpuInstance, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	info->device = gpu_handle(t.index);
	info->id = (unsigned int)t.in->id;
	info->profileId = t.in->profile_id;
	info->placement.start = (unsigned int)t.in->placement.start;
	info->placement.size = (unsigned int)t.in->placement.size;
	return NVML_SUCCESS;
}
