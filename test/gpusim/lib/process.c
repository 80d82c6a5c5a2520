// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Processes on GPUs and MIG devices. Clients of an MPS server are in a list of
// their own, the server is among those with a compute context. Those that only have
// device nodes open are in no list. There are no graphics.

#include "lib.h"

static void write_v1(void *infos, unsigned int i, const struct gs_process *p)
{
	nvmlProcessInfo_v1_t *out = (nvmlProcessInfo_v1_t *)infos + i;
	out->pid = (unsigned int)p->pid;
	out->usedGpuMemory = p->memory_bytes;
}

static void write_v2(void *infos, unsigned int i, const struct gs_process *p)
{
	nvmlProcessInfo_v2_t *out = (nvmlProcessInfo_v2_t *)infos + i;
	out->pid = (unsigned int)p->pid;
	out->usedGpuMemory = p->memory_bytes;
	out->gpuInstanceId = (unsigned int)p->instance_id; // -1 is NVML's 0xFFFFFFFF
	out->computeInstanceId = (unsigned int)p->compute_id;
}

enum { NO_KIND = 0, PLAIN_KINDS = 1 << GS_COMPUTE | 1 << GS_MPS_SERVER, CLIENT_KIND = 1 << GS_MPS_CLIENT };

typedef void (*write_fn)(void *infos, unsigned int i, const struct gs_process *p);

static nvmlReturn_t list(nvmlDevice_t device, unsigned int *count, void *infos, write_fn write, int kinds)
{
	ENTER();
	struct target t;
	nvmlReturn_t r = target_device(&view, device, &t);
	if (r != NVML_SUCCESS)
		return r;
	if (count == NULL || (infos == NULL && *count > 0))
		return NVML_ERROR_INVALID_ARGUMENT;
	// nvml.h: the sum over all instances is for privileged callers.
	if (t.ci == NULL && t.gpu->mig_current && !may_configure())
		return NVML_ERROR_NO_PERMISSION;
	unsigned int room = *count, found = 0;
	add_holders();
	for (int i = 0; i < view.process_count; i++) {
		if (!on_target(&view.processes[i], &t) || (kinds >> view.processes[i].kind & 1) == 0)
			continue;
		if (view.processes[i].pid <= 0)
			continue; // outside of the caller's PID namespace
		if (found < room)
			write(infos, found, &view.processes[i]);
		found++;
	}
	*count = found;
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

// LISTS defines the three versions of one list. The second and third differ in
// name only.
#define LISTS(name, kinds)                                                                               \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_v1_t *infos)      \
	{                                                                                                \
		return list(device, infoCount, infos, write_v1, kinds);                                  \
	}                                                                                                \
	nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_v2_t *infos) \
	{                                                                                                \
		return list(device, infoCount, infos, write_v2, kinds);                                  \
	}                                                                                                \
	nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *infoCount, nvmlProcessInfo_t *infos)    \
	{                                                                                                \
		return list(device, infoCount, infos, write_v2, kinds);                                  \
	}

LISTS(nvmlDeviceGetComputeRunningProcesses, PLAIN_KINDS)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, NO_KIND)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, CLIENT_KIND)
