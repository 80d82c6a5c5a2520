// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What GPU instance profiles are and where they can be. All of it is known
// with MIG mode off, too.

#include "lib.h"

#include <stdio.h>

static unsigned int capabilities_of(const struct gs_profile *p)
{
	switch (p->enumeration) {
	case NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX:
	case NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX:
	case NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX:
	case NVML_GPU_INSTANCE_PROFILE_3_SLICE_GFX:
		return NVML_GPU_INSTANCE_PROFILE_CAPS_GFX;
	}
	return 0; // no board reports peer-to-peer between instances
}

// FILL sets the fields that all versions of the structure have.
#define FILL(info, p)                                                    \
	do {                                                             \
		(info)->id = (p)->id;                                    \
		(info)->sliceCount = (unsigned int)(p)->slices;          \
		(info)->instanceCount = (unsigned int)(p)->max_instances; \
		(info)->multiprocessorCount = (unsigned int)(p)->sms;    \
		(info)->copyEngineCount = (unsigned int)(p)->copy_engines; \
		(info)->decoderCount = (unsigned int)(p)->decoders;      \
		(info)->encoderCount = (unsigned int)(p)->encoders;      \
		(info)->jpegCount = (unsigned int)(p)->jpeg;             \
		(info)->ofaCount = (unsigned int)(p)->ofa;               \
		(info)->memorySizeMB = (p)->memory_mib;                  \
	} while (0)

// profile_for checks the handle and finds a profile by its constant.
static nvmlReturn_t profile_for(nvmlDevice_t device, unsigned int profile, const struct gs_profile **p)
{
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (profile >= NVML_GPU_INSTANCE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*p = profile_by_enum(t.gpu, profile);
	return *p == NULL ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
						 nvmlGpuInstanceProfileInfo_t *info)
{
	ENTER();
	const struct gs_profile *p;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(device, profile, &p);
	if (r != NVML_SUCCESS)
		return r;
	FILL(info, p);
	info->isP2pSupported = 0;
	return NVML_SUCCESS;
}

// versioned fills the structure of the version that the caller wrote into it.
static nvmlReturn_t versioned(const struct gs_profile *p, void *out)
{
	nvmlGpuInstanceProfileInfo_v2_t *v2 = out;
	nvmlGpuInstanceProfileInfo_v3_t *v3 = out;
	switch (v2->version) {
	case nvmlGpuInstanceProfileInfo_v2:
		FILL(v2, p);
		v2->isP2pSupported = 0;
		profile_name(v2->name, sizeof(v2->name), p, 0);
		return NVML_SUCCESS;
	case nvmlGpuInstanceProfileInfo_v3:
		FILL(v3, p);
		profile_name(v3->name, sizeof(v3->name), p, 0);
		v3->capabilities = capabilities_of(p);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
						  nvmlGpuInstanceProfileInfo_v2_t *info)
{
	ENTER();
	const struct gs_profile *p;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(device, profile, &p);
	return r != NVML_SUCCESS ? r : versioned(p, info);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int profileId,
						      nvmlGpuInstanceProfileInfo_v2_t *info)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct gs_profile *p = profile_by_id(t.gpu, profileId);
	return p == NULL ? NVML_ERROR_NOT_SUPPORTED : versioned(p, info);
}

// possible_placements writes all placements. The caller's buffer has to be
// large enough: count is only returned, NVML never reads it.
static nvmlReturn_t possible_placements(nvmlDevice_t device, unsigned int profileId,
					nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct gs_profile *p = profile_by_id(t.gpu, profileId);
	if (p == NULL)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!may_configure())
		return NVML_ERROR_NO_PERMISSION;
	*count = (unsigned int)p->placement_count;
	for (int i = 0; placements != NULL && i < p->placement_count; i++) {
		placements[i].start = (unsigned int)p->placements[i].start;
		placements[i].size = (unsigned int)p->placements[i].size;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int profileId,
							nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
	return possible_placements(device, profileId, placements, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int profileId,
							   nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
	return possible_placements(device, profileId, placements, count);
}
