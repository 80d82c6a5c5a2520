// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// MIG devices: NVML's name for a compute instance seen as a device.

#include "lib.h"

// mig_at is the index-th visible MIG device of a GPU, ordered by GPU instance
// id and compute instance id, which is how nvidia-smi numbers them.
static int mig_at(struct gs_gpu *gpu, unsigned int index, struct gs_instance **in, struct gs_compute **ci)
{
	for (uint32_t g = 0; g < GS_MAX_INSTANCES; g++) {
		*in = instance_by_id(gpu, g);
		for (uint32_t c = 0; *in != NULL && c < GS_MAX_COMPUTE; c++) {
			*ci = compute_by_id(*in, c);
			if (*ci != NULL && instance_visible(gpu, *in, *ci) && index-- == 0)
				return 1;
		}
	}
	return 0;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (index == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*index = 0;
	if (t.ci == NULL) {
		while (gpu_at(*index) != t.index)
			++*index;
		return NVML_SUCCESS;
	}
	struct gs_instance *in;
	struct gs_compute *ci;
	for (; mig_at(t.gpu, *index, &in, &ci); ++*index)
		if (ci == t.ci)
			return NVML_SUCCESS;
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *isMigDevice)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (isMigDevice == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*isMigDevice = t.ci != NULL;
	return NVML_SUCCESS;
}

// max_count is the largest number of MIG devices a GPU can have: instances of
// its smallest profile, or compute instances in its largest.
static unsigned int max_count(const struct gs_gpu *gpu)
{
	int most = 0;
	for (int i = 0; i < gpu->profile_count; i++) {
		const struct gs_profile *p = &gpu->profiles[i];
		if (p->max_instances > most)
			most = p->max_instances;
		if (p->slices > most)
			most = p->slices;
	}
	return (unsigned int)most;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = t.gpu->mig_current ? max_count(t.gpu) : 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *migDevice)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (migDevice == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!t.gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	if (index >= max_count(t.gpu))
		return NVML_ERROR_INVALID_ARGUMENT;
	struct gs_instance *in;
	struct gs_compute *ci;
	if (!mig_at(t.gpu, index, &in, &ci))
		return NVML_ERROR_NOT_FOUND;
	*migDevice = mig_handle(t.index, in, ci);
	return migDevice->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t migDevice, nvmlDevice_t *device)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_mig(&view, migDevice, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = gpu_handle(t.index);
	return device->handle == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_mig(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (id == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*id = (unsigned int)t.in->id;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_mig(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (id == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*id = (unsigned int)t.ci->id;
	return NVML_SUCCESS;
}

static nvmlReturn_t attributes_of(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (attributes == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.ci == NULL) // nvml.h: only MIG devices
		return NVML_ERROR_NOT_SUPPORTED;
	const struct gs_ci_profile *ci = ci_profile_by_id(t.profile, t.ci->profile_id);
	attributes->multiprocessorCount = (unsigned int)(ci != NULL ? ci->sms : t.profile->sms);
	attributes->sharedCopyEngineCount = (unsigned int)t.profile->copy_engines;
	attributes->sharedDecoderCount = (unsigned int)t.profile->decoders;
	attributes->sharedEncoderCount = (unsigned int)t.profile->encoders;
	attributes->sharedJpegCount = (unsigned int)t.profile->jpeg;
	attributes->sharedOfaCount = (unsigned int)t.profile->ofa;
	attributes->gpuInstanceSliceCount = (unsigned int)t.profile->slices;
	attributes->computeInstanceSliceCount = (unsigned int)t.ci->placement.size;
	attributes->memorySizeMB = t.profile->memory_mib;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	return attributes_of(device, attributes);
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	return attributes_of(device, attributes);
}
