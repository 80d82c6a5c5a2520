// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Attributes of GPUs and MIG devices, and the modes that are not MIG.

#include "lib.h"

#include <stdio.h>

// GETTER defines a function that returns one number of a GPU. A MIG device
// answers for its GPU.
#define GETTER(name, type, field)                                 \
	nvmlReturn_t name(nvmlDevice_t device, type *out)         \
	{                                                         \
		ENTER();                                          \
		struct target t;                                  \
		nvmlReturn_t r = target_device(&view, device, &t); \
		if (r != NVML_SUCCESS)                            \
			return r;                                 \
		if (out == NULL)                                  \
			return NVML_ERROR_INVALID_ARGUMENT;       \
		*out = (type)t.gpu->field;                        \
		return NVML_SUCCESS;                              \
	}

GETTER(nvmlDeviceGetBrand, nvmlBrandType_t, brand)
GETTER(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, architecture)

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (t.ci == NULL)
		return copy_text(name, length, t.gpu->product_name);
	char mig[GS_NAME + 16], text[GS_LONG_NAME + GS_NAME + 16];
	profile_name(mig, sizeof(mig), t.profile, t.ci->placement.size);
	snprintf(text, sizeof(text), "%s %s", t.gpu->product_name, mig);
	return copy_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	return copy_text(uuid, length, t.ci == NULL ? t.gpu->uuid : t.ci->uuid);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (t.gpu->serial[0] == '\0')
		return NVML_ERROR_NOT_SUPPORTED;
	return copy_text(serial, length, t.gpu->serial);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minorNumber)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (minorNumber == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*minorNumber = (unsigned int)t.gpu->minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (major == NULL || minor == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*major = t.gpu->compute_major;
	*minor = t.gpu->compute_minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *numCores)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (numCores == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.gpu->mig_current) // nvml.h: not supported on MIG-enabled GPUs
		return NVML_ERROR_NOT_SUPPORTED;
	*numCores = (unsigned int)t.gpu->cores;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (mode == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (mode->version != nvmlDeviceAddressingMode_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (t.gpu->addressing_mode < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	mode->value = (unsigned int)t.gpu->addressing_mode;
	return NVML_SUCCESS;
}

static int coherent(const struct gs_gpu *gpu)
{
	return gpu->addressing_mode == NVML_DEVICE_ADDRESSING_MODE_ATS;
}

int driver_manages_memory(const struct gs_gpu *gpu)
{
	enum { DRIVER_BY_DEFAULT = 615 };
	int mode = view.coherent_memory;
	return coherent(gpu) && (mode == GS_COHERENT_DRIVER ||
				 (mode == GS_COHERENT_DEFAULT && driver_major() >= DRIVER_BY_DEFAULT));
}

// That other boards do not support it is assumed.
nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_v1_t *c2cModeInfo)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (c2cModeInfo == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!coherent(t.gpu))
		return NVML_ERROR_NOT_SUPPORTED;
	c2cModeInfo->isC2cEnabled = 1;
	return NVML_SUCCESS;
}

// The node id that NVML reports is the one of GPU memory on coherent platforms,
// not the host's node near the GPU. It is not modelled.
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	return node == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (current == NULL || pending == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.gpu->ecc < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = *pending = t.gpu->ecc ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *pVirtualMode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (pVirtualMode == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*pVirtualMode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
	return NVML_SUCCESS;
}

// memory is what a device has, and how much of it processes use.
static nvmlReturn_t memory_of(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	// A GPU that has the host's memory has none of its own.
	if (t.gpu->memory_bytes == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	add_holders();
	out->total = t.gpu->memory_bytes;
	out->reserved = t.gpu->reserved_bytes;
	out->used = memory_in_use(&view, t.index, -1);
	if (t.in != NULL) {
		out->total = t.profile->memory_mib << 20;
		out->reserved = (unsigned long long)t.profile->reserved_mib << 20;
		out->used = memory_in_use(&view, t.index, t.in->id);
	}
	if (out->used > out->total - out->reserved)
		out->used = out->total - out->reserved;
	out->free = out->total - out->reserved - out->used;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	ENTER();
	nvmlMemory_v2_t v2;
	nvmlReturn_t r = memory_of(device, &v2);
	if (r != NVML_SUCCESS)
		return r;
	if (memory == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	memory->total = v2.total;
	memory->free = v2.free;
	memory->used = v2.used + v2.reserved; // v1 counts the reserved as used
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	ENTER();
	if (memory == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (memory->version != nvmlMemory_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return memory_of(device, memory);
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (mode == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*mode = (nvmlComputeMode_t)(t.ci == NULL ? t.gpu->compute_mode : t.ci->compute_mode);
	return NVML_SUCCESS;
}

struct setting {
	nvmlDevice_t device;
	int value;
};

static nvmlReturn_t set_compute_mode(struct gs_machine *m, void *arg)
{
	const struct setting *s = arg;
	struct target t;
	nvmlReturn_t r = target_device(m, s->device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (t.ci != NULL)
		t.ci->compute_mode = s->value;
	else
		t.gpu->compute_mode = s->value;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if ((unsigned int)mode >= NVML_COMPUTEMODE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	// nvml.h: with MIG enabled, it must be a MIG device; the thread mode is gone. MIG
	// guide: exclusive-process is not supported when the GPU is in MIG mode.
	if ((t.ci == NULL && t.gpu->mig_current) || mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD ||
	    (t.ci != NULL && mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!may_administrate())
		return NVML_ERROR_NO_PERMISSION;
	struct setting s = {.device = device, .value = (int)mode};
	return change(set_compute_mode, &s);
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (mode == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*mode = t.gpu->persistence ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

static nvmlReturn_t set_persistence(struct gs_machine *m, void *arg)
{
	const struct setting *s = arg;
	struct target t;
	nvmlReturn_t r = target_gpu(m, s->device, &t);
	if (r == NVML_SUCCESS)
		t.gpu->persistence = s->value;
	return r;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_gpu(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (mode != NVML_FEATURE_ENABLED && mode != NVML_FEATURE_DISABLED)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!may_administrate())
		return NVML_ERROR_NO_PERMISSION;
	struct setting s = {.device = device, .value = mode == NVML_FEATURE_ENABLED};
	return change(set_persistence, &s);
}
