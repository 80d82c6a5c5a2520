// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What compute instance profiles a GPU instance has.

#include "lib.h"

#define FILL(info, t, ci)                                                        \
	do {                                                                     \
		(info)->id = (ci)->id;                                           \
		(info)->sliceCount = (unsigned int)(ci)->slices;                 \
		(info)->instanceCount = (unsigned int)(ci)->max_instances;       \
		(info)->multiprocessorCount = (unsigned int)(ci)->sms;           \
		(info)->sharedCopyEngineCount = (unsigned int)(t)->profile->copy_engines; \
		(info)->sharedDecoderCount = (unsigned int)(t)->profile->decoders; \
		(info)->sharedEncoderCount = (unsigned int)(t)->profile->encoders; \
		(info)->sharedJpegCount = (unsigned int)(t)->profile->jpeg;      \
		(info)->sharedOfaCount = (unsigned int)(t)->profile->ofa;        \
	} while (0)

static nvmlReturn_t profile_for(nvmlGpuInstance_t g, unsigned int profile, unsigned int engine, struct target *t,
				const struct gs_ci_profile **ci)
{
	nvmlReturn_t r = target_instance(&view, g, t);
	if (r != NVML_SUCCESS)
		return r;
	if (profile >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT || engine >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < t->profile->ci_profile_count; i++) {
		*ci = &t->profile->ci_profiles[i];
		if ((unsigned int)(*ci)->enumeration == profile)
			return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gpuInstance, unsigned int profile,
							  unsigned int engProfile,
							  nvmlComputeInstanceProfileInfo_t *info)
{
	ENTER();
	struct target t;
	const struct gs_ci_profile *ci;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(gpuInstance, profile, engProfile, &t, &ci);
	if (r != NVML_SUCCESS)
		return r;
	FILL(info, &t, ci);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t gpuInstance, unsigned int profile,
							   unsigned int engProfile,
							   nvmlComputeInstanceProfileInfo_v2_t *info)
{
	ENTER();
	struct target t;
	const struct gs_ci_profile *ci;
	if (info == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t r = profile_for(gpuInstance, profile, engProfile, &t, &ci);
	if (r != NVML_SUCCESS)
		return r;
	nvmlComputeInstanceProfileInfo_v3_t *v3 = (void *)info;
	switch (info->version) {
	case nvmlComputeInstanceProfileInfo_v2:
		FILL(info, &t, ci);
		profile_name(info->name, sizeof(info->name), t.profile, ci->slices);
		return NVML_SUCCESS;
	case nvmlComputeInstanceProfileInfo_v3:
		FILL(v3, &t, ci);
		profile_name(v3->name, sizeof(v3->name), t.profile, ci->slices);
		v3->capabilities = 0;
		return NVML_SUCCESS;
	}
	return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}
