// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Life of compute instances.

#include "lib.h"

// A profile of n compute slices can start at multiples of n. That is an
// assumption: NVIDIA documents no rule.
static int placement_count(const struct gs_profile *p, const struct gs_ci_profile *ci)
{
	return ci->slices > 0 ? p->slices / ci->slices : 0;
}

static struct gs_placement placement_at(const struct gs_ci_profile *ci, int i)
{
	return (struct gs_placement){.start = i * ci->slices, .size = ci->slices};
}

static int fits(const struct gs_instance *in, const struct gs_ci_profile *ci, struct gs_placement at)
{
	int same = 0;
	for (int i = 0; i < in->compute_count; i++) {
		const struct gs_compute *c = &in->compute[i];
		if (at.start < c->placement.start + c->placement.size && c->placement.start < at.start + at.size)
			return 0;
		same += c->profile_id == ci->id;
	}
	return same < ci->max_instances;
}

// profile_for finds a compute profile by its id in the GPU instance.
static nvmlReturn_t profile_for(struct gs_machine *m, nvmlGpuInstance_t g, unsigned int id, struct target *t,
				const struct gs_ci_profile **ci)
{
	nvmlReturn_t r = target_instance(m, g, t);
	if (r != NVML_SUCCESS)
		return r;
	*ci = ci_profile_by_id(t->profile, id);
	return *ci == NULL ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
								unsigned int *count)
{
	ENTER();
	struct target t;
	const struct gs_ci_profile *ci;
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(&view, gpuInstance, profileId, &t, &ci);
	if (r != NVML_SUCCESS)
		return r;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	unsigned int room = 0, same = 0;
	for (int i = 0; i < placement_count(t.profile, ci); i++)
		room += (unsigned int)fits(t.in, ci, placement_at(ci, i));
	for (int i = 0; i < t.in->compute_count; i++)
		same += t.in->compute[i].profile_id == ci->id;
	unsigned int limit = (unsigned int)ci->max_instances - same;
	*count = room < limit ? room : limit;
	return NVML_SUCCESS;
}

// The array has to be large enough: count is only returned.
nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
								 nvmlComputeInstancePlacement_t *placements,
								 unsigned int *count)
{
	ENTER();
	struct target t;
	const struct gs_ci_profile *ci;
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(&view, gpuInstance, profileId, &t, &ci);
	if (r != NVML_SUCCESS)
		return r;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	*count = (unsigned int)placement_count(t.profile, ci);
	for (unsigned int i = 0; placements != NULL && i < *count; i++) {
		placements[i].start = (unsigned int)placement_at(ci, (int)i).start;
		placements[i].size = (unsigned int)placement_at(ci, (int)i).size;
	}
	return NVML_SUCCESS;
}

struct creation {
	nvmlGpuInstance_t parent;
	unsigned int profile;
	const nvmlComputeInstancePlacement_t *placement; // NULL: the first that fits
	nvmlComputeInstance_t *out;
};

static nvmlReturn_t place(const struct target *t, const struct gs_ci_profile *ci,
			  const nvmlComputeInstancePlacement_t *wish, struct gs_placement *at)
{
	int known = 0;
	for (int i = 0; i < placement_count(t->profile, ci); i++) {
		*at = placement_at(ci, i);
		if (wish != NULL && (wish->start != (unsigned int)at->start || wish->size != (unsigned int)at->size))
			continue;
		known = 1;
		if (fits(t->in, ci, *at))
			return NVML_SUCCESS;
	}
	return wish != NULL && !known ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t create(struct gs_machine *m, void *arg)
{
	const struct creation *c = arg;
	struct target t;
	struct gs_placement at;
	const struct gs_ci_profile *ci;
	nvmlReturn_t r = profile_for(m, c->parent, c->profile, &t, &ci);
	if (r == NVML_SUCCESS)
		r = place(&t, ci, c->placement, &at);
	if (r != NVML_SUCCESS)
		return r;
	uint32_t id = 0;
	while (compute_by_id(t.in, id) != NULL)
		id++;
	if (t.in->compute_count >= GS_MAX_COMPUTE)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	struct gs_compute *new = &t.in->compute[t.in->compute_count++];
	memset(new, 0, sizeof(*new));
	new->serial = m->next_serial++;
	new->id = (int32_t)id;
	new->profile_id = ci->id;
	new->placement = at;
	compute_uuid(new->uuid, sizeof(new->uuid), t.gpu, t.in, at);
	*c->out = compute_handle(t.index, t.in, new);
	return c->out->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

static nvmlReturn_t create_compute(const struct creation *c)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_instance(&view, c->parent, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (c->out == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_administrate() || !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	return change(create, (void *)c);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
						  nvmlComputeInstance_t *computeInstance)
{
	struct creation c = {.parent = gpuInstance, .profile = profileId, .out = computeInstance};
	return create_compute(&c);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
							       const nvmlComputeInstancePlacement_t *placement,
							       nvmlComputeInstance_t *computeInstance)
{
	struct creation c = {
		.parent = gpuInstance, .profile = profileId, .placement = placement, .out = computeInstance};
	if (placement == NULL) {
		ENTER();
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	return create_compute(&c);
}

static nvmlReturn_t destroy(struct gs_machine *m, void *arg)
{
	struct target t;
	nvmlReturn_t r = target_compute(m, *(nvmlComputeInstance_t *)arg, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (held(m, t.index, t.in->id, t.ci->id))
		return NVML_ERROR_IN_USE;
	struct gs_compute *last = &t.in->compute[--t.in->compute_count];
	memmove(t.ci, t.ci + 1, (size_t)(last - t.ci) * sizeof(*last));
	memset(last, 0, sizeof(*last));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t computeInstance)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_compute(&view, computeInstance, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (!may_administrate() || !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	return change(destroy, &computeInstance);
}

// The array has to be as long as the profile says: count is only returned.
nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
						nvmlComputeInstance_t *computeInstances, unsigned int *count)
{
	ENTER();
	struct target t;
	const struct gs_ci_profile *ci;
	if (computeInstances == NULL || count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(&view, gpuInstance, profileId, &t, &ci);
	if (r != NVML_SUCCESS)
		return r;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	*count = 0;
	for (int i = 0; i < t.in->compute_count; i++) {
		if (t.in->compute[i].profile_id != ci->id)
			continue;
		computeInstances[*count] = compute_handle(t.index, t.in, &t.in->compute[i]);
		if (computeInstances[(*count)++].handle == NULL)
			return NVML_ERROR_MEMORY;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gpuInstance, unsigned int id,
						   nvmlComputeInstance_t *computeInstance)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_instance(&view, gpuInstance, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (computeInstance == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	const struct gs_compute *ci = compute_by_id(t.in, id);
	if (ci == NULL)
		return NVML_ERROR_NOT_FOUND;
	*computeInstance = compute_handle(t.index, t.in, ci);
	return computeInstance->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

// info_of fills what both versions have. The first has no placement, and its
// callers no room for one. device is the MIG device, which is how a caller
// gets the UUID of what it just created.
static nvmlReturn_t info_of(nvmlComputeInstance_t c, nvmlComputeInstanceInfo_t *info, int with_placement)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_compute(&view, c, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	info->device = mig_handle(t.index, t.in, t.ci);
	info->gpuInstance = instance_handle(t.index, t.in);
	info->id = (unsigned int)t.ci->id;
	info->profileId = t.ci->profile_id;
	if (with_placement) {
		info->placement.start = (unsigned int)t.ci->placement.start;
		info->placement.size = (unsigned int)t.ci->placement.size;
	}
	return info->device.handle == NULL || info->gpuInstance.handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t computeInstance, nvmlComputeInstanceInfo_t *info)
{
	return info_of(computeInstance, info, 0);
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t computeInstance, nvmlComputeInstanceInfo_t *info)
{
	return info_of(computeInstance, info, 1);
}
