// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Limits of memory that the driver holds for cgroups, from driver 615 on. A hard limit is held
// (../state/cgroup.c), a soft one is only kept: nothing is evicted here.

#include "lib.h"

enum { FIRST_DRIVER = 615 };

static nvmlReturn_t target_of(struct gs_machine *m, nvmlDevice_t device, struct target *t)
{
	nvmlReturn_t r = target_device(m, device, t);
	// In which order it is found out is assumed, and that a GPU in MIG mode has none.
	if (r == NVML_SUCCESS && (driver_major() < FIRST_DRIVER || t->ci != NULL || t->gpu->mig_current))
		r = NVML_ERROR_NOT_SUPPORTED;
	return r;
}

struct limits {
	nvmlDevice_t device;
	const nvmlSetMemoryLimits_v1_t *wanted;
	uint64_t cgroup;
};

static nvmlReturn_t set(struct gs_machine *m, void *arg)
{
	const struct limits *l = arg;
	struct target t;
	nvmlReturn_t r = target_of(m, l->device, &t);
	if (r != NVML_SUCCESS)
		return r;
	struct gs_memory_limit *present = gs_memory_limit_of(m, t.index, l->cgroup);
	if (present == NULL)
		present = gs_new_memory_limit(m, t.index, l->wanted->nameSpace);
	if (present == NULL)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	present->soft = l->wanted->softLimit;
	present->hard = l->wanted->hardLimit;
	if (present->soft == 0 && present->hard == NVML_DEVICE_MEMORY_LIMIT_MAX)
		present->inode = 0;
	return NVML_SUCCESS;
}

// too_much reports whether a limit is no amount of the GPU's memory.
static int too_much(const struct gs_gpu *gpu, uint64_t limit)
{
	return limit > gpu->memory_bytes && limit != NVML_DEVICE_MEMORY_LIMIT_MAX;
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_of(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (limits == NULL || limits->nameSpace == NULL || limits->softLimit > limits->hardLimit ||
	    too_much(t.gpu, limits->softLimit) || too_much(t.gpu, limits->hardLimit))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_administrate())
		return NVML_ERROR_NO_PERMISSION;
	struct limits l = {.device = device, .wanted = limits, .cgroup = gs_cgroup(limits->nameSpace)};
	return l.cgroup == 0 ? NVML_ERROR_OPERATING_SYSTEM : change(set, &l);
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_of(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (limits == NULL || limits->nameSpace == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	uint64_t cgroup = gs_cgroup(limits->nameSpace);
	if (cgroup == 0)
		return NVML_ERROR_OPERATING_SYSTEM;
	const struct gs_memory_limit *l = gs_memory_limit_of(&view, t.index, cgroup);
	if (l == NULL)
		return NVML_ERROR_NOT_FOUND;
	add_holders();
	limits->softLimit = l->soft;
	limits->hardLimit = l->hard;
	limits->currentUsed = gs_used_within(&view, l);
	return NVML_SUCCESS;
}
